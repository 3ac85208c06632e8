/* The sharded step on other dtypes than float32, with masters and without: what it computes, which api_test.py compares
 * with the C++ library, and what it refuses. */
#include "check.h"
#include "formulas.h"

typedef struct {
  const char* name;
  lockstep_dtype dtype;
  size_t element, state; /* bytes */
  int has_master;
} Type;
static const Type kTypes[] = {
    {"float32", LOCKSTEP_FLOAT32, 4, 4, 0},          {"float64", LOCKSTEP_FLOAT64, 8, 8, 0},
    {"float16", LOCKSTEP_FLOAT16, 2, 2, 0},          {"bfloat16", LOCKSTEP_BFLOAT16, 2, 2, 0},
    {"float16-master", LOCKSTEP_FLOAT16, 2, 4, 1},   {"bfloat16-master", LOCKSTEP_BFLOAT16, 2, 4, 1},
};
enum { kTypeCount = sizeof kTypes / sizeof kTypes[0] };

/* Numbers of any dtype without arithmetic in it; those of 16 bits are -0.5 to -0.25 and 0.25 to 0.5. */
static void fill(void* values, uint32_t seed, lockstep_dtype dtype) {
  int i;
  for (i = 0; i < kCount; ++i) {
    seed = seed * 1664525u + 1013904223u;
    if (dtype == LOCKSTEP_FLOAT32)
      ((float*)values)[i] = (float)(seed >> 8) / 16777216.0f - 0.5f;
    else if (dtype == LOCKSTEP_FLOAT64)
      ((double*)values)[i] = (float)(seed >> 8) / 16777216.0f - 0.5f;
    else if (dtype == LOCKSTEP_FLOAT16)
      ((uint16_t*)values)[i] = (uint16_t)(((seed >> 16) & 0x83FF) | 0x3400);
    else
      ((uint16_t*)values)[i] = (uint16_t)(((seed >> 16) & 0x807F) | 0x3E80);
  }
}

/* Of words of four bytes, or of two where elements have no more. */
static unsigned hash_of(const void* values, size_t element) {
  const size_t word = element == 2 ? 2 : 4, words = kCount * element / word;
  uint32_t hash = 2166136261u;
  size_t i;
  for (i = 0; i < words; ++i) {
    uint32_t bits = word == 2 ? ((const uint16_t*)values)[i] : ((const uint32_t*)values)[i];
    hash = (hash ^ bits) * 16777619u;
  }
  return hash;
}

static void* own(lockstep_group* group, size_t element) {
  void* memory = NULL;
  OK(lockstep_allocate(group, kCount * element, &memory));
  return memory;
}

static void* together(lockstep_group* group, size_t element) {
  void* memory = NULL;
  OK(lockstep_allocate_together(group, kCount * element, &memory));
  return memory;
}

static void take_step(lockstep_group* group, int formula, int step, const Type* type, void* parameters,
                      const void* gradients, void* const* states, float* master) {
  const lockstep_sgd sgd = sgd_of(formula, step);
  const lockstep_adam adam = adam_of(formula, step);
  if (formula < kAdam)
    OK(lockstep_sharded_sgd_typed(group, &sgd, step, parameters, gradients, formula == kPlain ? NULL : states[0],
                                  master, kCount, type->dtype));
  else
    OK(lockstep_sharded_adam_typed(group, &adam, step, parameters, gradients, states[0], states[1],
                                   formula == kAdam ? states[2] : NULL, master, kCount, type->dtype));
}

/* The weights after some steps; the parameters lie once for all ranks, or in a copy on each. */
static unsigned trained(lockstep_group* group, int formula, const Type* type, int shared) {
  const int rank = lockstep_rank(group);
  void* parameters = shared ? together(group, type->element) : own(group, type->element);
  void *gradients = own(group, type->element), *states[3];
  float* master = type->has_master ? together(group, sizeof(float)) : NULL;
  unsigned hash, gradient;
  int step, s;
  for (s = 0; s < 3; ++s) states[s] = together(group, type->state);
  if (!shared || rank == 0) fill(parameters, 42, type->dtype);
  for (step = 1; step <= kSteps; ++step) {
    fill(gradients, (uint32_t)(1000 * step + rank), type->dtype);
    gradient = hash_of(gradients, type->element);
    take_step(group, formula, step, type, parameters, gradients, states, master);
    CHECK(hash_of(gradients, type->element) == gradient);
  }
  hash = hash_of(parameters, type->element);
  for (s = 0; s < 3; ++s) OK(lockstep_free(group, states[s]));
  if (master != NULL) OK(lockstep_free(group, master));
  OK(lockstep_free(group, gradients));
  OK(lockstep_free(group, parameters));
  return hash;
}

enum { kOne16 = 0x3F80 }; /* 1 in bfloat16 */

/* Steps below the last bit of a bfloat16 add up in a master, and are lost without one. */
static void adds_up(lockstep_group* world) {
  const lockstep_sgd sgd = {sizeof sgd, 1.0 / 1024, 0, 0, 0, 0};
  uint16_t *parameters = own(world, 2), *gradients = own(world, 2);
  float* master = together(world, sizeof(float));
  int i, step, has_master;
  for (has_master = 0; has_master < 2; ++has_master) {
    for (i = 0; i < kCount; ++i) parameters[i] = gradients[i] = kOne16;
    for (step = 1; step <= 64; ++step)
      OK(lockstep_sharded_sgd_typed(world, &sgd, step, parameters, gradients, NULL, has_master ? master : NULL, kCount,
                                    LOCKSTEP_BFLOAT16));
    for (i = 0; i < kCount; ++i) CHECK(parameters[i] == (has_master ? 0x3F70 : kOne16)); /* 1 - 1/16, or 1 still */
  }
  for (i = 0; i < kCount; ++i) CHECK(master[i] == 1 - 1.0f / 16);
  OK(lockstep_barrier(world, NULL)); /* all have read it */
  for (i = 0; i < kCount; ++i) parameters[i] = kOne16; /* what a program writes counts */
  OK(lockstep_sharded_sgd_typed(world, &sgd, 1, parameters, gradients, NULL, master, kCount, LOCKSTEP_BFLOAT16));
  for (i = 0; i < kCount; ++i) CHECK(master[i] == 1 - 1.0f / 1024);
  OK(lockstep_free(world, master));
  OK(lockstep_free(world, gradients));
  OK(lockstep_free(world, parameters));
}

/* A double has room for a step of 2^-40 of it. */
static void is_double(lockstep_group* world) {
  const double tiny = 1.0 / ((double)(1 << 20) * (1 << 20));
  lockstep_sgd sgd = {sizeof sgd, 0, 0, 0, 0, 0};
  double *parameters = together(world, 8), *gradients = own(world, 8);
  int i;
  sgd.lr = tiny;
  for (i = 0; i < kCount; ++i) gradients[i] = 1;
  if (lockstep_rank(world) == 0)
    for (i = 0; i < kCount; ++i) parameters[i] = 1;
  OK(lockstep_sharded_sgd_typed(world, &sgd, 1, parameters, gradients, NULL, NULL, kCount, LOCKSTEP_FLOAT64));
  for (i = 0; i < kCount; ++i) CHECK(parameters[i] == 1 - tiny);
  OK(lockstep_free(world, gradients));
  OK(lockstep_free(world, parameters));
}

void test_typed_step(lockstep_group* world) {
  const int size = lockstep_size(world);
  int formula, t;
  for (t = 0; t < kTypeCount; ++t)
    for (formula = 0; formula < kFormulas; ++formula) {
      const unsigned hash = trained(world, formula, &kTypes[t], 0);
      int32_t mine = (int32_t)hash, least, most;
      CHECK(trained(world, formula, &kTypes[t], 1) == hash);
      OK(lockstep_all_reduce(world, &mine, &least, 1, LOCKSTEP_INT32, LOCKSTEP_MIN, NULL));
      OK(lockstep_all_reduce(world, &mine, &most, 1, LOCKSTEP_INT32, LOCKSTEP_MAX, NULL));
      CHECK(least == most);
      if (lockstep_rank(world) == 0) printf("%s-%s %08x over %d ranks\n", kNames[formula], kTypes[t].name, hash, size);
    }
  adds_up(world);
  is_double(world);
}

void test_typed_misuse(lockstep_group* world) {
  const lockstep_status bad = LOCKSTEP_INVALID_ARGUMENT, differs = LOCKSTEP_MISMATCH;
  const lockstep_sgd sgd = {sizeof sgd, 0.1, 0.9, 0, 0, 0};
  const lockstep_adam adam = {sizeof adam, 0.1, 0.9, 0.99, 1e-8, 0, 1};
  void *p = together(world, 2), *g = own(world, 2), *m = together(world, 4);
  float *master = together(world, 4), *other = together(world, 4), *mine = own(world, 4);
  const lockstep_dtype bf16 = LOCKSTEP_BFLOAT16;
  const int odd = lockstep_rank(world) == lockstep_size(world) - 1;
  unsigned before;
  if (lockstep_rank(world) == 0) fill(p, 1, bf16);
  fill(g, (uint32_t)lockstep_rank(world), bf16);
  OK(lockstep_barrier(world, NULL));
  before = hash_of(p, 2);
  REFUSED(bad, "the group is null", lockstep_sharded_sgd_typed(NULL, &sgd, 1, p, g, m, master, kCount, bf16));
  REFUSED(bad, "lockstep_sharded_adam_typed: options is null",
          lockstep_sharded_adam_typed(world, NULL, 1, p, g, m, m, NULL, NULL, kCount, bf16));
  REFUSED(bad, "the dtype is 8; parameters of LOCKSTEP_FLOAT32, FLOAT64, FLOAT16 and BFLOAT16 can be stepped",
          lockstep_sharded_sgd_typed(world, &sgd, 1, p, g, m, NULL, kCount, LOCKSTEP_INT64));
  REFUSED(bad, "the dtype is -1", lockstep_sharded_adam_typed(world, &adam, 1, p, g, m, m, NULL, NULL, kCount, -1));
  REFUSED(bad, "a master is for parameters of float16 and bfloat16, and these are float32; give null",
          lockstep_sharded_sgd_typed(world, &sgd, 1, p, g, m, master, kCount / 2, LOCKSTEP_FLOAT32));
  REFUSED(bad, "the master array of 70001 float32 (280004 bytes) does not lie in memory from lockstep_allocate_tog",
          lockstep_sharded_sgd_typed(world, &sgd, 1, p, g, m, mine, kCount, bf16)); /* it exists once */
  REFUSED(bad, "the parameters array of 70001 float64 (560008 bytes)",
          lockstep_sharded_sgd_typed(world, &sgd, 1, p, g, m, NULL, kCount, LOCKSTEP_FLOAT64));
  REFUSED(bad, "the momentum array of 70001 float32", /* beside a master it is of floats */
          lockstep_sharded_sgd_typed(world, &sgd, 1, p, g, p, master, kCount, bf16));
  REFUSED(bad, "overlap", lockstep_sharded_sgd_typed(world, &sgd, 1, p, g, master, master, kCount, bf16));
  REFUSED(bad, "overlap", lockstep_sharded_sgd_typed(world, &sgd, 1, p, g, m, (float*)m + 1, kCount - 1, bf16));
  if (lockstep_size(world) > 1) {
    REFUSED(differs, "steps float16, and rank 0 bfloat16",
            lockstep_sharded_sgd_typed(world, &sgd, 1, p, g, m, NULL, kCount, odd ? LOCKSTEP_FLOAT16 : bf16));
    REFUSED(differs, "gives no master, and rank 0 does",
            lockstep_sharded_sgd_typed(world, &sgd, 1, p, g, m, odd ? NULL : master, kCount, bf16));
    REFUSED(differs, "another part",
            lockstep_sharded_sgd_typed(world, &sgd, 1, p, g, m, odd ? other : master, kCount, bf16));
  }
  CHECK(hash_of(p, 2) == before);
  OK(lockstep_barrier(world, NULL));
  OK(lockstep_sharded_sgd_typed(world, &sgd, 1, p, g, m, master, kCount, bf16)); /* the group goes on */
  CHECK(hash_of(p, 2) != before);
}
