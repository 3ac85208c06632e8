/* The sharded step: what it computes, which api_test.py compares with the C++ library, and what it refuses. */
#include <math.h>
#include <stddef.h>

#include "check.h"
#include "formulas.h"

static float uniform(uint32_t* state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / 16777216.0f - 0.5f;
}

static void fill(float* values, uint32_t seed) {
  int i;
  for (i = 0; i < kCount; ++i) values[i] = uniform(&seed);
}

static unsigned hash_of(const float* values) {
  uint32_t hash = 2166136261u;
  int i;
  for (i = 0; i < kCount; ++i) {
    uint32_t bits;
    memcpy(&bits, values + i, sizeof bits);
    hash = (hash ^ bits) * 16777619u;
  }
  return hash;
}

static float* own(lockstep_group* group) {
  void* memory = NULL;
  OK(lockstep_allocate(group, kCount * sizeof(float), &memory));
  return memory;
}

static float* together(lockstep_group* group) {
  void* memory = NULL;
  OK(lockstep_allocate_together(group, kCount * sizeof(float), &memory));
  CHECK((uintptr_t)memory % 4096 == 0);
  return memory;
}

static void take_step(lockstep_group* group, int formula, int step, float* parameters, const float* gradients,
                      float* const* states) {
  const lockstep_sgd sgd = sgd_of(formula, step);
  const lockstep_adam adam = adam_of(formula, step);
  if (formula < kAdam)
    OK(lockstep_sharded_sgd(group, &sgd, step, parameters, gradients, formula == kPlain ? NULL : states[0], kCount));
  else
    OK(lockstep_sharded_adam(group, &adam, step, parameters, gradients, states[0], states[1],
                             formula == kAdam ? states[2] : NULL, kCount));
}

/* The weights after some steps; the parameters lie once for all ranks, or in a copy on each. */
static unsigned trained(lockstep_group* group, int formula, int shared) {
  const int rank = lockstep_rank(group);
  float *parameters = shared ? together(group) : own(group), *gradients = own(group), *states[3];
  unsigned hash, gradient;
  int step, s;
  for (s = 0; s < 3; ++s) states[s] = together(group);
  if (!shared || rank == 0) fill(parameters, 42);
  for (step = 1; step <= kSteps; ++step) {
    fill(gradients, (uint32_t)(1000 * step + rank));
    gradient = hash_of(gradients);
    take_step(group, formula, step, parameters, gradients, states);
    CHECK(hash_of(gradients) == gradient);
  }
  hash = hash_of(parameters);
  for (s = 0; s < 3; ++s) OK(lockstep_free(group, states[s]));
  OK(lockstep_free(group, gradients));
  OK(lockstep_free(group, parameters));
  return hash;
}

void test_sharded_step(lockstep_group* world) {
  const int size = lockstep_size(world);
  lockstep_group* part = NULL;
  int formula, i;
  for (formula = 0; formula < kFormulas; ++formula) {
    const unsigned hash = trained(world, formula, 0);
    int32_t mine = (int32_t)hash, least, most;
    CHECK(trained(world, formula, 1) == hash); /* in memory that was used before: it is zeros again */
    OK(lockstep_all_reduce(world, &mine, &least, 1, LOCKSTEP_INT32, LOCKSTEP_MIN, NULL));
    OK(lockstep_all_reduce(world, &mine, &most, 1, LOCKSTEP_INT32, LOCKSTEP_MAX, NULL));
    CHECK(least == most);
    if (lockstep_rank(world) == 0) printf("%s %08x over %d ranks\n", kNames[formula], hash, size);
  }
  OK(lockstep_split(world, 0, 0, &part)); /* a group of its own has memory of its own */
  CHECK(trained(part, kAdamW, 1) == trained(world, kAdamW, 0));
  OK(lockstep_leave(part));
  { /* parts of arrays, each with a call of its own: as one call for all */
    const lockstep_sgd sgd = {sizeof sgd, 0.5, 0, 0, 0, 0};
    float *parts = together(world), *whole = own(world), *gradients = own(world);
    const int64_t kCuts[] = {0, 1, 17, 600, 600, kCount};
    fill(whole, 7);
    if (lockstep_rank(world) == 0) fill(parts, 7);
    fill(gradients, (uint32_t)lockstep_rank(world));
    for (i = 0; i + 1 < (int)(sizeof kCuts / sizeof kCuts[0]); ++i)
      OK(lockstep_sharded_sgd(world, &sgd, 1, parts + kCuts[i], gradients + kCuts[i], NULL, kCuts[i + 1] - kCuts[i]));
    OK(lockstep_sharded_sgd(world, &sgd, 1, whole, gradients, NULL, kCount));
    CHECK(hash_of(parts) == hash_of(whole));
    OK(lockstep_sharded_sgd(world, &sgd, 1, NULL, NULL, NULL, 0)); /* nothing at all */
  }
}

/* Wrong on this rank: refused here, without the others. */
static void refused_alone(lockstep_group* world, float* p, float* g, float* m) {
  const lockstep_status bad = LOCKSTEP_INVALID_ARGUMENT;
  const lockstep_sgd sgd = {sizeof sgd, 0.1, 0.9, 0, 0, 0}, empty = {0, 0.1, 0, 0, 0, 0};
  const lockstep_sgd negative = {sizeof sgd, -1, 0, 0, 0, 0}, eager = {sizeof sgd, 0.1, 0, 0, 0, 1};
  const lockstep_adam adam = {sizeof adam, 0.1, 0.9, 0.99, 1e-8, 0, 1}, all_of_it = {sizeof adam, .1, 1, 0.99, 0, 0, 0};
  const lockstep_adam nothing = {sizeof adam, 0.1, 0.9, 0.99, NAN, 0, 0};
  static float foreign[kCount];
  float *freed = own(world), *state = own(world);
  void* memory;
  OK(lockstep_free(world, freed));
  REFUSED(bad, "the group is null", lockstep_sharded_sgd(NULL, &sgd, 1, p, g, m, kCount));
  REFUSED(bad, "options is null", lockstep_sharded_sgd(world, NULL, 1, p, g, m, kCount));
  REFUSED(bad, "options is null", lockstep_sharded_adam(world, NULL, 1, p, g, m, m, NULL, kCount));
  REFUSED(bad, "sizeof(lockstep_sgd)", lockstep_sharded_sgd(world, &empty, 1, p, g, m, kCount));
  REFUSED(bad, "lr is -1", lockstep_sharded_sgd(world, &negative, 1, p, g, m, kCount));
  REFUSED(bad, "nesterov needs momentum", lockstep_sharded_sgd(world, &eager, 1, p, g, m, kCount));
  REFUSED(bad, "beta1 is 1.000000; it must", lockstep_sharded_adam(world, &all_of_it, 1, p, g, m, m, NULL, kCount));
  REFUSED(bad, "eps is nan", lockstep_sharded_adam(world, &nothing, 1, p, g, m, m, NULL, kCount));
  REFUSED(bad, "the step is 0", lockstep_sharded_sgd(world, &sgd, 0, p, g, m, kCount));
  REFUSED(bad, "the count is -1", lockstep_sharded_sgd(world, &sgd, 1, p, g, m, -1));
  REFUSED(bad, "the parameters array is null", lockstep_sharded_sgd(world, &sgd, 1, NULL, g, m, kCount));
  REFUSED(bad, "the momentum array is null", lockstep_sharded_sgd(world, &sgd, 1, p, g, NULL, kCount));
  REFUSED(bad, "the exp_avg_sq array is null", lockstep_sharded_adam(world, &adam, 1, p, g, m, NULL, NULL, kCount));
  REFUSED(bad, "parameters array of 70001 float32 (280004 bytes) does not lie in memory from lockstep_allocate() or",
          lockstep_sharded_sgd(world, &sgd, 1, foreign, g, m, kCount));
  REFUSED(bad, "gradients array", lockstep_sharded_sgd(world, &sgd, 1, p, foreign, m, kCount));
  REFUSED(bad, "gradients array", lockstep_sharded_sgd(world, &sgd, 1, p, m, m, kCount)); /* it is each rank's own */
  REFUSED(bad, "has been freed", lockstep_sharded_sgd(world, &sgd, 1, p, freed, m, kCount));
  REFUSED(bad, "momentum array", lockstep_sharded_sgd(world, &sgd, 1, p, g, state, kCount)); /* it exists once */
  REFUSED(bad, "parameters array", lockstep_sharded_sgd(world, &sgd, 1, p + 2000, g, m, kCount));
  REFUSED(bad, "gradients array", lockstep_sharded_sgd(world, &sgd, 1, p, g - 1, m, kCount));
  REFUSED(bad, "overlap", lockstep_sharded_adam(world, &adam, 1, p, g, m, m + 10, NULL, kCount - 10));
  REFUSED(bad, "memory is null", lockstep_allocate_together(world, 8, NULL));
  REFUSED(bad, "group is null", lockstep_allocate_together(NULL, 8, &memory));
  REFUSED(bad, "more than any machine has", lockstep_allocate_together(world, (size_t)-1, &memory));
  OK(lockstep_free(world, state));
}

/* What the ranks give differs: refused on all of them, and nothing is stepped. */
static void refused_together(lockstep_group* world, float* p, float* g, float* m) {
  const lockstep_status differs = LOCKSTEP_MISMATCH;
  const int other = lockstep_rank(world) == lockstep_size(world) - 1;
  const lockstep_sgd sgd = {sizeof sgd, other ? 0.2 : 0.1, 0.9, 0, 0, 0}, same = {sizeof sgd, 0.1, 0.9, 0, 0, 0};
  const lockstep_sgd plain = {sizeof sgd, 0.1, other ? 0 : 0.9, 0, 0, 0};
  const lockstep_adam adam = {sizeof adam, 0.1, 0.9, 0.9, 0, 0, 0};
  float *copy = own(world), *second = together(world);
  unsigned before;
  void* memory;
  char last[64];
  sprintf(last, "rank %d", lockstep_size(world) - 1);
  REFUSED(differs, "steps 70000 parameters, and rank 0 70001",
          lockstep_sharded_sgd(world, &same, 1, p, g, m, kCount - other));
  CHECK(strstr(lockstep_last_error(), last) != NULL);
  REFUSED(differs, "has other options", lockstep_sharded_sgd(world, &sgd, 1, p, g, m, kCount));
  REFUSED(differs, "is at another step",
          lockstep_sharded_adam(world, &adam, 1 + other, p, g, m, second, NULL, kCount));
  REFUSED(differs, "another formula", lockstep_sharded_sgd(world, &plain, 1, p, g, m, kCount));
  REFUSED(differs, "all ranks share the parameters on rank 0",
          lockstep_sharded_sgd(world, &same, 1, other ? copy : p, g, m, kCount));
  REFUSED(differs, "another part", lockstep_sharded_sgd(world, &same, 1, p, g, other ? second : m, kCount));
  /* Copies that differ as a whole, or in the last values, which no rank may take for the others'. */
  fill(copy, other ? 8 : 7);
  before = hash_of(copy);
  REFUSED(differs, "has other values in its copy of the parameters than rank 0",
          lockstep_sharded_sgd(world, &same, 1, copy, g, m, kCount));
  CHECK(strstr(lockstep_last_error(), last) != NULL);
  REFUSED(differs, "lockstep_broadcast()", lockstep_sharded_adam(world, &adam, 1, copy, g, m, second, NULL, kCount));
  CHECK(hash_of(copy) == before);
  fill(copy, 7);
  if (other) copy[kCount - 1] += 1;
  REFUSED(differs, "has other values", lockstep_sharded_sgd(world, &same, 1, copy, g, m, kCount));
  REFUSED(differs, "has other values", lockstep_sharded_sgd(world, &same, 1, copy + kCount - 1, g, m, 1));
  REFUSED(differs, "wants 200 bytes, and rank 0 100", lockstep_allocate_together(world, other ? 200 : 100, &memory));
  CHECK(memory == NULL);
  void *one = NULL, *next = NULL;
  OK(lockstep_allocate_together(world, 64, &one));
  OK(lockstep_allocate_together(world, 64, &next));
  REFUSED(differs, "frees other memory than rank 0", lockstep_free(world, other ? next : one));
  OK(lockstep_free(world, one));
  OK(lockstep_free(world, next));
  OK(lockstep_free(world, copy));
  OK(lockstep_free(world, second));
}

void test_sharded_misuse(lockstep_group* world) {
  const int size = lockstep_size(world);
  float *parameters = together(world), *gradients = own(world), *momentum = together(world);
  const struct { /* of a program that was compiled with a later header */
    lockstep_sgd known;
    double unknown;
  } later = {{sizeof later, 0.1, 0.9, 0, 0, 0}, 7};
  lockstep_sgd earlier = {offsetof(lockstep_sgd, nesterov), 0.1, 0.9, 0.5, 0, 1}; /* its last field is none of it */
  unsigned before;
  void* memory;
  if (lockstep_rank(world) == 0) fill(parameters, 1);
  fill(gradients, (uint32_t)lockstep_rank(world));
  OK(lockstep_barrier(world, NULL));
  before = hash_of(parameters);
  refused_alone(world, parameters, gradients, momentum);
  if (size > 1) refused_together(world, parameters, gradients, momentum);
  CHECK(hash_of(parameters) == before);
  CHECK(lockstep_allocate_together(world, (size_t)1 << 45, &memory) == LOCKSTEP_OUT_OF_RESOURCES && memory == NULL);
  OK(lockstep_sharded_sgd(world, &later.known, 1, parameters, gradients, momentum, kCount)); /* the group goes on */
  CHECK(hash_of(parameters) != before);
  OK(lockstep_sharded_sgd(world, &earlier, 2, parameters, gradients, momentum, kCount));
  OK(lockstep_free(world, momentum));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "has been freed",
          lockstep_sharded_sgd(world, &later.known, 3, parameters, gradients, momentum, kCount));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "freed before", lockstep_free(world, momentum));
}

/* A rank that goes wrong while the others step. */
void test_sharded_faults(lockstep_group* world) {
  const lockstep_sgd sgd = {sizeof sgd, 0.1, 0, 0, 0, 0};
  lockstep_group* parts[2];
  int i;
  for (i = 0; i < 2; ++i) {
    float *parameters, *gradients;
    OK(lockstep_split(world, 0, 0, &parts[i]));
    parameters = together(parts[i]);
    gradients = own(parts[i]);
    OK(lockstep_sharded_sgd(parts[i], &sgd, 1, parameters, gradients, NULL, kCount));
    if (lockstep_rank(world) != 1)
      REFUSED(i == 0 ? LOCKSTEP_RANK_GONE : LOCKSTEP_MISMATCH, i == 0 ? "rank 1" : "barrier",
              lockstep_sharded_sgd(parts[i], &sgd, 2, parameters, gradients, NULL, kCount));
    else if (i == 1)
      REFUSED(LOCKSTEP_MISMATCH, "sharded_step", lockstep_barrier(parts[i], NULL));
    OK(lockstep_leave(parts[i]));
  }
  OK(lockstep_barrier(world, NULL));
}
