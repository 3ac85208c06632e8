/* What the configuration chooses: losses that must be the same have the same results, on any number of ranks. */

#include "check.h"

#include <math.h>

static lockstep_train_model* model_of(lockstep_train_world* world, const char* folder, const char* module,
                                      const char* loss, double rate, const char* more) {
  char path[1024], configuration[8192];
  lockstep_train_model* model = NULL;
  snprintf(path, sizeof path, "%s/%s.pt", folder, module);
  snprintf(configuration, sizeof configuration,
           "{\"optimizer\": {\"type\": \"sgd\", \"lr\": %.17g, \"momentum\": 0.5}, \"loss\": %s%s}", rate, loss, more);
  OK(lockstep_train_create(world, path, configuration, &model));
  return model;
}

/* The losses of `steps` steps on batches of 12 rows, which the ranks share. */
static void train(lockstep_train_world* world, lockstep_train_model* model, int steps, double* losses) {
  const int64_t rows = 12 / lockstep_train_size(world);
  for (int step = 0; step < steps; ++step) {
    batch part;
    fill(&part, step, lockstep_train_rank(world) * rows, rows);
    OK(lockstep_train_step(model, &part.input, 1, &part.target, 1, losses + step));
  }
}

enum { kSteps = 6, kNumbers = 12 * kOutputs };

void test_losses(lockstep_train_world* world, const char* folder) {
  double mean[kSteps], other[kSteps];
  char loss[1200];
  lockstep_train_model* const plain = model_of(world, folder, "net", "\"mse\"", 0.1, "");
  train(world, plain, kSteps, mean);
  CHECK(mean[kSteps - 1] < mean[0]);

  snprintf(loss, sizeof loss, "{\"type\": \"torchscript\", \"file\": \"%s/loss.pt\"}", folder);
  lockstep_train_model* const by_file = model_of(world, folder, "net", loss, 0.1, "");
  train(world, by_file, kSteps, other);
  for (int step = 0; step < kSteps; ++step) CHECK(fabs(other[step] - mean[step]) < 1e-12);
  CHECK(fabs(fingerprint(by_file) - fingerprint(plain)) < 1e-10);

  train(world, model_of(world, folder, "with_loss", "\"module\"", 0.1, ""), kSteps, other);
  for (int step = 0; step < kSteps; ++step) CHECK(fabs(other[step] - mean[step]) < 1e-12);

  /* A sum over all numbers of all ranks is their mean times their count. */
  lockstep_train_model* const sum =
      model_of(world, folder, "net", "{\"type\": \"mse\", \"reduction\": \"sum\"}", 0.1 / kNumbers, "");
  train(world, sum, kSteps, other);
  for (int step = 0; step < kSteps; ++step) CHECK(fabs(other[step] / kNumbers - mean[step]) < 1e-12);
  CHECK(fabs(fingerprint(sum) - fingerprint(plain)) < 1e-10);
}

/* Checkpoints and a log at intervals, and a module that is converted. */
void test_intervals(lockstep_train_world* world, const char* folder) {
  char more[2400], path[1024];
  double losses[kSteps], before = 0, after = 0;
  int64_t step = 0;
  snprintf(more, sizeof more, ", \"log\": \"%s/log\", \"checkpoint\": {\"every_steps\": 4}", folder);
  snprintf(path, sizeof path, "%s/intervals", folder);
  lockstep_train_model* model = model_of(world, folder, "net", "\"mse\"", 0.1, more);
  OK(lockstep_train_resume(model, path, &step));
  CHECK(step == 0);
  train(world, model, kSteps, losses);
  OK(lockstep_train_log(model, "heat", 3.5));
  OK(lockstep_train_free(model));
  model = model_of(world, folder, "net", "\"mse\"", 0.1, more);
  OK(lockstep_train_resume(model, path, &step));
  CHECK(step == 4);
  OK(lockstep_train_free(model));

  model = model_of(world, folder, "net", "\"mse\"", 0.1, ", \"dtype\": \"float32\"");
  float x[4 * kInputs] = {1, 2, 3}, y[4 * kOutputs] = {1};
  const int64_t x_shape[] = {4, kInputs}, y_shape[] = {4, kOutputs};
  const lockstep_train_array input = {x, x_shape, 2, LOCKSTEP_FLOAT32}, target = {y, y_shape, 2, LOCKSTEP_FLOAT32};
  OK(lockstep_train_evaluate(model, &input, 1, &target, 1, &before));
  OK(lockstep_train_step(model, &input, 1, &target, 1, NULL));
  OK(lockstep_train_evaluate(model, &input, 1, &target, 1, &after));
  CHECK(after < before);
}

/* Rank 1 never calls: the others are told in time. */
void test_missing_call(lockstep_train_world* world, const char* folder) {
  lockstep_train_model* const model = make(world, folder, CONFIGURATION);
  batch part;
  fill(&part, 0, 0, 4);
  if (lockstep_train_rank(world) == 1) {
    char path[1024];
    snprintf(path, sizeof path, "%s/told", folder);
    for (FILE* told = NULL; told == NULL; told = fopen(path, "r")) continue;
    return;
  }
  const lockstep_status status = lockstep_train_step(model, &part.input, 1, &part.target, 1, NULL);
  CHECK(status == LOCKSTEP_TIMED_OUT);
  CHECK(strstr(lockstep_train_last_error(), "rank 1") != NULL);
  char path[1024];
  snprintf(path, sizeof path, "%s/told", folder);
  fclose(fopen(path, "w"));
}

/* A backward that fails on all ranks leaves nothing behind. */
void test_failing_backward(lockstep_train_world* world, const char* folder) {
  lockstep_train_model* const model = model_of(world, folder, "fails", "\"mse\"", 0.01, "");
  lockstep_train_model* const undisturbed = model_of(world, folder, "fails", "\"mse\"", 0.01, "");
  batch bad;
  double losses[kSteps];
  train(world, undisturbed, kSteps, losses);
  fill(&bad, 0, 0, 4);
  for (int i = 0; i < 4 * kInputs; ++i) bad.x[i] = 1000 * (1 + i % 5);
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "modified by an inplace operation",
          lockstep_train_step(model, &bad.input, 1, &bad.target, 1, NULL));
  train(world, model, kSteps, losses);
  CHECK(fingerprint(model) == fingerprint(undisturbed));
}

/* With weight_by_rows the calls of one step have one weight. */
void test_rows(lockstep_train_world* world, const char* folder) {
  lockstep_train_model* const model =
      model_of(world, folder, "net", "\"mse\"", 0.1, ", \"accumulate\": 2, \"weight_by_rows\": true");
  batch part;
  int64_t steps = 0;
  fill(&part, 0, 0, 0);
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "no rows", lockstep_train_step(model, &part.input, 1, &part.target, 1, NULL));
  fill(&part, 0, 0, 4);
  OK(lockstep_train_step(model, &part.input, 1, &part.target, 1, NULL));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "gradients are being accumulated", lockstep_train_save_checkpoint(model, folder));
  fill(&part, 1, 0, 5);
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "inputs[0] has 5 rows, but had 4",
          lockstep_train_step(model, &part.input, 1, &part.target, 1, NULL));
  fill(&part, 1, 0, 4);
  OK(lockstep_train_step(model, &part.input, 1, &part.target, 1, NULL));
  OK(lockstep_train_steps(model, &steps));
  CHECK(steps == 1);
}
