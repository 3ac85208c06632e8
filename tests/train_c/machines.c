/* Machines that train by themselves and synchronise now and then ("diloco"). LOCKSTEP_MACHINE makes several of one. */

#include "check.h"

#include <math.h>

#define BEGIN "{\"optimizer\": {\"type\": \"sgd\", \"lr\": 0.1}, \"loss\": \"mse\", \"dtype\": \"float32\""

enum { kRows = 4 };

/* The module float.pt takes [rows, 3] and returns [rows, 1], in float32. */
typedef struct part {
  float x[kRows * kInputs], y[kRows];
  int64_t x_shape[2], y_shape[2];
  lockstep_train_array input, target;
} part;

static void fill_part(part* of, int step, int first) {
  for (int row = 0; row < kRows; ++row) {
    float sum = 0;
    for (int i = 0; i < kInputs; ++i)
      sum += of->x[row * kInputs + i] = sinf(0.7f * (float)(first + row) + 1.3f * (float)i + 0.31f * (float)step);
    of->y[row] = cosf(sum);
  }
  of->x_shape[0] = of->y_shape[0] = kRows;
  of->x_shape[1] = kInputs;
  of->y_shape[1] = 1;
  const lockstep_train_array input = {of->x, of->x_shape, 2, LOCKSTEP_FLOAT32};
  const lockstep_train_array target = {of->y, of->y_shape, 2, LOCKSTEP_FLOAT32};
  of->input = input;
  of->target = target;
}

/* `more`: further entries. */
static lockstep_train_model* make_part(lockstep_train_world* world, const char* folder, const char* more) {
  char path[1024], configuration[2048];
  lockstep_train_model* model = NULL;
  snprintf(path, sizeof path, "%s/float.pt", folder);
  snprintf(configuration, sizeof configuration, "%s%s}", BEGIN, more);
  OK(lockstep_train_create(world, path, configuration, &model));
  return model;
}

/* The sum of the outputs for a batch that is the same on all ranks, each with its own factor. */
static double outputs_of(lockstep_train_model* model) {
  part probe;
  double sum = 0;
  fill_part(&probe, 1000, 0);
  OK(lockstep_train_infer(model, &probe.input, 1, &probe.target, 1));
  for (int i = 0; i < kRows; ++i) sum += (double)probe.y[i] * (1 + i);
  return sum;
}

static void train_until(lockstep_train_world* world, lockstep_train_model* model, int end) {
  int64_t done = 0;
  OK(lockstep_train_steps(model, &done));
  for (; done < end; ++done) {
    part of;
    fill_part(&of, (int)done, kRows * lockstep_train_rank(world));
    OK(lockstep_train_step(model, &of.input, 1, &of.target, 1, NULL));
  }
}

static double evaluated(lockstep_train_model* model) {
  part of;
  double loss = 0;
  fill_part(&of, 2000, 0);
  OK(lockstep_train_evaluate(model, &of.input, 1, &of.target, 1, &loss));
  return loss;
}

/* The mean of the machines' weights after each step of plain SGD is a step by the mean of the gradients, where machines have as many ranks. */
void test_machines_average(lockstep_train_world* world, const char* folder) {
  lockstep_train_model* const together = make_part(world, folder, "");
  lockstep_train_model* const average =
      make_part(world, folder, ", \"diloco\": {\"sync_every\": 1, \"outer_lr\": 1, \"outer_momentum\": 0}");
  train_until(world, together, 6);
  train_until(world, average, 6);
  const double expected = outputs_of(together), found = outputs_of(average);
  CHECK(fabs(found - expected) < 1e-5 && fabs(expected) > 1e-3);
  OK(lockstep_train_free(together));
  OK(lockstep_train_free(average));
}

/* After lockstep_train_finish(). */
static void test_finished(lockstep_train_model* model) {
  part of;
  double loss = 0;
  int64_t before = 0, after = 0;
  const double outputs = outputs_of(model);
  fill_part(&of, 0, 0);
  OK(lockstep_train_steps(model, &before));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "lockstep_train_finish() has ended the training",
          lockstep_train_step(model, &of.input, 1, &of.target, 1, &loss));
  OK(lockstep_train_finish(model));
  evaluated(model);
  OK(lockstep_train_steps(model, &after));
  CHECK(before == after && outputs_of(model) == outputs);
}

/* The other ranks' outputs are compared by whoever reads what all print. */
static void test_rounds(lockstep_train_world* world, const char* folder) {
  char path[1024], checkpoints[1024];
  const char* const kDiLoCo =
      ", \"diloco\": {\"sync_every\": 4, \"fragments\": 2, \"overlap_steps\": 1, \"wire\": \"int8\","
      " \"error_feedback\": true, \"mixing\": 0.25}, \"lr_scheduler\": {\"type\": \"step\", \"step_size\": 5}";
  snprintf(path, sizeof path, "%s/separate.pt", folder);
  snprintf(checkpoints, sizeof checkpoints, "%s/separate", folder);
  lockstep_train_model* const model = make_part(world, folder, kDiLoCo);
  int64_t step = -1;
  const double first = evaluated(model);
  OK(lockstep_train_resume(model, checkpoints, &step));
  CHECK(step == 0);
  train_until(world, model, 6); /* in the middle of a round */
  OK(lockstep_train_save_checkpoint(model, checkpoints));
  train_until(world, model, 11);
  const double last = evaluated(model), outputs = outputs_of(model);
  CHECK(last < first);
  printf("weights %.17g\n", outputs);
  OK(lockstep_train_save(model, path));
  CHECK(outputs_of(model) == outputs);
  OK(lockstep_train_free(model));

  lockstep_train_model* const next = make_part(world, folder, kDiLoCo);
  OK(lockstep_train_resume(next, checkpoints, &step));
  CHECK(step == 6);
  train_until(world, next, 11);
  CHECK(evaluated(next) == last && outputs_of(next) == outputs);
  train_until(world, next, 13);
  OK(lockstep_train_load(next, path)); /* and the rounds begin anew */
  CHECK(outputs_of(next) == outputs);
  train_until(world, next, 19);
  OK(lockstep_train_finish(next));
  printf("later %.17g\n", outputs_of(next));
  test_finished(next);
  OK(lockstep_train_load(next, path)); /* on all machines */
  CHECK(outputs_of(next) == outputs);
  OK(lockstep_train_free(next));
}

static void refused(lockstep_train_world* world, const char* folder, const char* entries, const char* words) {
  char path[1024], configuration[2048];
  lockstep_train_model* model = NULL;
  snprintf(path, sizeof path, "%s/float.pt", folder);
  snprintf(configuration, sizeof configuration, "%s, \"diloco\": %s}", BEGIN, entries);
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, words, lockstep_train_create(world, path, configuration, &model));
  CHECK(model == NULL);
}

static void test_wrong_values(lockstep_train_world* world, const char* folder) {
  refused(world, folder, "{\"sync_every\": 0}", "diloco.sync_every is 0; give a whole number from 1");
  refused(world, folder, "{\"sync_every\": 2.5}", "diloco.sync_every is 2.5; give a whole number");
  refused(world, folder, "{\"fragments\": 0}", "diloco.fragments is 0; give a whole number from 1");
  refused(world, folder, "{\"fragments\": 5}", "its fragments are more than the parameters that are trained; give 1 to 4");
  refused(world, folder, "{\"overlap_steps\": -1}", "diloco.overlap_steps is -1; give a whole number from 0");
  refused(world, folder, "{\"sync_every\": 4, \"overlap_steps\": 4}", "diloco.overlap_steps is 4; give less than sync_every, 4");
  refused(world, folder, "{\"mixing\": 1.5}", "diloco.mixing is 1.5; give 0 to 1");
  refused(world, folder, "{\"wire\": \"int3\"}", "diloco.wire is \"int3\"; give fp32, bf16, int8 or int4");
  refused(world, folder, "{\"error_feedback\": 1}", "diloco.error_feedback is 1; give true or false");
  refused(world, folder, "{\"outer_lr\": 0}", "diloco.outer_lr is 0; give more than 0");
  refused(world, folder, "{\"outer_momentum\": 1}", "diloco.outer_momentum is 1; give at least 0, and less than 1");
  refused(world, folder, "{\"max_nonfinite_rounds\": 0}", "diloco.max_nonfinite_rounds is 0; give a whole number from 1");
  refused(world, folder, "{\"every\": 4}", "diloco.every is not known there; known are sync_every, ");
  refused(world, folder, "3", "diloco is 3; give an object in braces");
  refused(world, folder, "\"int8\"", "diloco is \"int8\"; give an object in braces");
  refused(world, folder, "{\"sync_every\": 4, \"wire\": \"int8\", \"sync_every\": 9}", "the key \"sync_every\" is given twice in one object");
  refused(world, folder, "{\"outer_lr\": 1e400}", "a number is too large: '1e400'");
  char path[1024];
  lockstep_train_model* model = NULL;
  snprintf(path, sizeof path, "%s/net.pt", folder);
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "the module has parameters of float64, which machines do not synchronise",
          lockstep_train_create(world, path, "{\"optimizer\": \"sgd\", \"loss\": \"mse\", \"diloco\": {}}", &model));
}

/* Rank 1 gives something else, and is named on all ranks. */
static void test_different_values(lockstep_train_world* world, const char* folder) {
  const int other = lockstep_train_rank(world) == 1;
  char path[1024], configuration[2048];
  lockstep_train_model* model = NULL;
  snprintf(path, sizeof path, "%s/float.pt", folder);
#define DIFFERENT(words, mine, others)                                                                      \
  do {                                                                                                      \
    snprintf(configuration, sizeof configuration, "%s%s}", BEGIN, other ? (others) : (mine));               \
    REFUSED(LOCKSTEP_MISMATCH, words, lockstep_train_create(world, path, configuration, &model));           \
  } while (0)
  DIFFERENT("rank 0 has diloco/sync_every 4, but rank 1 has diloco/sync_every 5", ", \"diloco\": {\"sync_every\": 4}",
            ", \"diloco\": {\"sync_every\": 5}");
  DIFFERENT("rank 0 has diloco/wire \"fp32\", but rank 1 has diloco/wire \"int4\"", ", \"diloco\": {}",
            ", \"diloco\": {\"wire\": \"int4\"}");
  DIFFERENT("rank 0 has diloco/error_feedback false, but rank 1 has none", ", \"diloco\": {}", "");
  DIFFERENT("rank 0 has none, but rank 1 has diloco/error_feedback false", "", ", \"diloco\": {}");
  /* A default that is spelled out is no difference, and neither is the order. */
  model = make_part(world, folder,
                    other ? ", \"diloco\": {\"wire\": \"fp32\", \"mixing\": 0.5, \"sync_every\": 100}, \"accumulate\": 1,"
                            " \"checkpoint\": {\"keep_last\": 2}, \"log\": \"\""
                          : ", \"diloco\": {}");
  OK(lockstep_train_free(model));
  model = NULL;
  OK(lockstep_train_create(world, path,
                           other ? "{\"loss\": {\"reduction\": \"mean\", \"type\": \"smooth_l1\", \"beta\": 1.0},"
                                   " \"optimizer\": {\"type\": \"adam\", \"lr\": 1e-3, \"beta1\": 0.9}}"
                                 : "{\"optimizer\": \"adam\", \"loss\": \"smooth_l1\"}",
                           &model));
  OK(lockstep_train_free(model));
}

/* What a rank does wrong in a step is told on its machine, and the training goes on. */
static void test_wrong_steps(lockstep_train_world* world, const char* folder) {
  const int last = lockstep_train_size(world) - 1;
  lockstep_train_model* const model = make_part(world, folder, ", \"diloco\": {\"sync_every\": 3}");
  part of;
  train_until(world, model, 2);
  fill_part(&of, 0, 0);
  if (lockstep_train_rank(world) == last) {
    of.input.dtype = LOCKSTEP_INT32;
    REFUSED(LOCKSTEP_INVALID_ARGUMENT, "lockstep_train_step of model",
            lockstep_train_step(model, &of.input, 1, &of.target, 1, NULL));
  }
  train_until(world, model, 3);
  /* All are told where one machine has made more steps than another. */
  if (lockstep_train_rank(world) == last) train_until(world, model, 4);
  double loss = 0;
  fill_part(&of, 0, 0);
  REFUSED(LOCKSTEP_MISMATCH, "rank 0 has steps 3, but rank", lockstep_train_evaluate(model, &of.input, 1, &of.target, 1, &loss));
  if (lockstep_train_rank(world) != last) train_until(world, model, 4);
  evaluated(model);
  printf("weights %.17g\n", outputs_of(model));
  OK(lockstep_train_free(model));
}

/* With --islands the rounds go on after an evaluation, and end when the machine says so. */
void test_islands(lockstep_train_world* world, const char* folder) {
  int64_t number = -1, count = -1;
  OK(lockstep_train_shard(world, &number, &count));
  printf("part %d of %d\n", (int)number, (int)count);
  lockstep_train_model* const model = make_part(world, folder, ", \"diloco\": {\"sync_every\": 4}");
  train_until(world, model, 3);
  evaluated(model);
  train_until(world, model, 7);
  evaluated(model);
  OK(lockstep_train_finish(model));
  printf("weights %.17g\n", outputs_of(model));
  test_finished(model);
  printf("trained\n");
  OK(lockstep_train_free(model));
}

void test_machines(lockstep_train_world* world, const char* folder) {
  test_rounds(world, folder);
  test_wrong_values(world, folder);
}

void test_machines_that_differ(lockstep_train_world* world, const char* folder) {
  test_different_values(world, folder);
  test_wrong_steps(world, folder);
}
