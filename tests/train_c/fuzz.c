/* Random calls: each returns a status, and the training goes on. */

#include "check.h"

static uint64_t state = 88172645463325252u;
static uint64_t draw(uint64_t below) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state % below;
}

static double memory[1 << 15]; /* as large as any array below */
static int64_t shapes[4][6];

static lockstep_train_array any_array(int number) {
  static const int64_t sizes[] = {1, 2, 3, 4, 5, 3, 2, 0, -1, INT64_MIN, INT64_C(1) << 40, INT64_MAX};
  lockstep_train_array array = {memory, shapes[number], (int32_t)draw(6), (lockstep_dtype)draw(9)};
  const uint64_t kind = draw(16);
  for (int i = 0; i < 6; ++i) shapes[number][i] = sizes[draw(kind == 0 ? 12 : 7)];
  if (draw(2)) array.dimensions = 2, array.dtype = LOCKSTEP_FLOAT64;
  if (kind == 1) array.data = NULL;
  if (kind == 2) array.shape = NULL;
  if (kind == 3) array.dtype = (lockstep_dtype)(draw(1000)) - 500;
  if (kind == 4) array.dimensions = (int32_t)draw(200) - 100;
  if (kind == 4 && array.dimensions > 6 && array.dimensions <= 64) array.dimensions = 100;
  if (draw(2)) {
    const lockstep_train_array good = {memory, shapes[number], 2, LOCKSTEP_FLOAT64};
    shapes[number][0] = 4, shapes[number][1] = number < 2 ? kInputs : kOutputs;
    return good;
  }
  return array;
}

/* Good JSON with some characters changed. */
static const char* any_configuration(void) {
  static char text[512];
  snprintf(text, sizeof text, "%s", CONFIGURATION);
  for (uint64_t changes = draw(4); changes > 0; --changes) text[draw(strlen(text))] = (char)(32 + draw(95));
  if (draw(8) == 0) text[draw(strlen(text) + 1)] = 0;
  return draw(32) ? text : NULL;
}

static lockstep_status any_files(lockstep_train_model* model, const char* folder) {
  char path[1024];
  static const char* const names[] = {"net.pt", "garbage.pt", "other.pt", "none.pt", "", "frozen.pt"};
  const uint64_t kind = draw(6);
  snprintf(path, sizeof path, "%s/%s", folder, names[draw(6)]);
  const char* const given = draw(8) ? path : NULL;
  if (kind == 0) return lockstep_train_save(model, draw(2) ? "/no folder/x.pt" : given == path ? "/" : NULL);
  if (kind == 1) return lockstep_train_load(model, given);
  if (kind == 2) return lockstep_train_save_checkpoint(model, draw(2) ? "" : NULL);
  if (kind == 3) return lockstep_train_resume(model, draw(2) ? "" : NULL, NULL);
  return lockstep_train_log(model, draw(2) ? "name" : NULL, 1);
}

static lockstep_status any_call(lockstep_train_world* world, lockstep_train_model* good, const char* folder) {
  char path[1024];
  lockstep_train_model* model = draw(8) ? good : draw(2) ? NULL : (lockstep_train_model*)(uintptr_t)draw(1 << 20);
  if (model != good && model != NULL && (uintptr_t)model == (uintptr_t)good) model = NULL;
  lockstep_train_array arrays[4];
  for (int i = 0; i < 4; ++i) arrays[i] = any_array(i);
  const lockstep_train_array* const in = draw(32) ? arrays : NULL;
  const lockstep_train_array* const out = draw(32) ? arrays + 2 : NULL;
  const int32_t in_count = draw(4) ? 1 : (int32_t)draw(4) - 1, out_count = draw(4) ? 1 : (int32_t)draw(4) - 1;
  const int32_t in_most = in_count > 2 ? 2 : in_count, out_most = out_count > 2 ? 2 : out_count;
  double number;
  int64_t whole, counts;
  switch (draw(26)) {
    case 0: {
      lockstep_train_model* made = NULL;
      snprintf(path, sizeof path, "%s/net.pt", folder);
      const lockstep_status status =
          lockstep_train_create(draw(8) ? world : NULL, draw(16) ? path : NULL, any_configuration(), &made);
      CHECK((status == LOCKSTEP_OK) == (made != NULL));
      if (made != NULL) OK(lockstep_train_free(made));
      return status;
    }
    case 1:
      return any_files(model, folder);
    case 2:
      return lockstep_train_steps(model, draw(2) ? &whole : NULL);
    case 3:
      return lockstep_train_learning_rate(model, draw(2) ? &number : NULL);
    case 4:
      return lockstep_train_free(draw(2) ? NULL : (lockstep_train_model*)&number);
    case 5: {
      lockstep_train_replica* replica = NULL;
      void* none[2] = {NULL, NULL};
      return lockstep_train_attach(world, draw(2) ? none : NULL, NULL, (int64_t)draw(4) - 1, (int32_t)draw(4) - 1,
                                   draw(8) ? &replica : NULL);
    }
    case 6:
      return lockstep_train_average((lockstep_train_replica*)(uintptr_t)draw(1 << 20));
    case 7:
      return lockstep_train_evaluate(model, in, in_most, out, out_most, draw(8) ? &number : NULL);
    case 8:
      return lockstep_train_shard(draw(8) ? world : NULL, draw(8) ? &whole : NULL, draw(8) ? &counts : NULL);
    case 9:
      return lockstep_train_finish(model);
    default:
      return draw(2) ? lockstep_train_step(model, in, in_most, out, out_most, draw(8) ? &number : NULL)
                     : lockstep_train_infer(model, in, in_most, out, out_most);
  }
}

void test_fuzz(lockstep_train_world* world, const char* folder, long calls) {
  lockstep_train_model* const model = make(world, folder, CONFIGURATION);
  long good = 0, refused = 0;
  int64_t steps = 0, counted = 0;
  for (long call = 0; call < calls; ++call) {
    lockstep_status status;
    int64_t before = 0, after = 0;
    OK(lockstep_train_steps(model, &before));
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i += 1) memory[i] = 0.25;
    status = any_call(world, model, folder);
    OK(lockstep_train_steps(model, &after));
    CHECK(after == before || (after == before + 1 && status == LOCKSTEP_OK));
    steps += after - before;
    if (status == LOCKSTEP_OK) {
      ++good;
      continue;
    }
    ++refused;
    CHECK(status == LOCKSTEP_INVALID_ARGUMENT || status == LOCKSTEP_TRAIN_FILE_FAILED ||
          status == LOCKSTEP_OUT_OF_RESOURCES);
    CHECK(strlen(lockstep_train_last_error()) > 10);
  }
  OK(lockstep_train_steps(model, &counted));
  CHECK(counted == steps && steps > calls / 200);
  CHECK(good > calls / 50 && refused > calls / 4);
  batch last;
  fill(&last, 0, 0, 4);
  OK(lockstep_train_step(model, &last.input, 1, &last.target, 1, NULL));
  printf("%ld calls: %ld good, %ld refused, %ld steps\n", calls, good, refused, (long)steps);
}
