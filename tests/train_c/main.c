/* liblockstep_train, tried from C: train_c_rank TEST FOLDER [NUMBER]. */

#include "check.h"

#include <math.h>

void fill(batch* of, int step, int64_t first, int64_t rows) {
  CHECK(rows <= kMostRows);
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (int64_t i = 0; i < kInputs; ++i)
      sum += of->x[row * kInputs + i] = sin(0.7 * (double)(first + row) + 1.3 * (double)i + 0.31 * step);
    for (int64_t i = 0; i < kOutputs; ++i) of->y[row * kOutputs + i] = cos(sum + (double)i);
  }
  of->x_shape[0] = of->y_shape[0] = rows;
  of->x_shape[1] = kInputs;
  of->y_shape[1] = kOutputs;
  const lockstep_train_array input = {of->x, of->x_shape, 2, LOCKSTEP_FLOAT64};
  const lockstep_train_array target = {of->y, of->y_shape, 2, LOCKSTEP_FLOAT64};
  of->input = input;
  of->target = target;
}

lockstep_train_model* make(lockstep_train_world* world, const char* folder, const char* configuration) {
  char path[1024];
  lockstep_train_model* model = NULL;
  snprintf(path, sizeof path, "%s/net.pt", folder);
  OK(lockstep_train_create(world, path, configuration, &model));
  return model;
}

double fingerprint(lockstep_train_model* model) {
  batch probe;
  double sum = 0;
  fill(&probe, 1000, 0, 8);
  OK(lockstep_train_infer(model, &probe.input, 1, &probe.target, 1));
  for (int i = 0; i < 8 * kOutputs; ++i) sum += probe.y[i] * (1 + i);
  return sum;
}

/* `steps` steps on batches of 12 rows, which the ranks share. */
static double train(lockstep_train_world* world, lockstep_train_model* model, int steps) {
  const int64_t rows = 12 / lockstep_train_size(world);
  int64_t done = 0;
  double loss = 0;
  OK(lockstep_train_steps(model, &done));
  for (; steps > 0; --steps, ++done) {
    batch part;
    fill(&part, (int)done, lockstep_train_rank(world) * rows, rows);
    OK(lockstep_train_step(model, &part.input, 1, &part.target, 1, &loss));
  }
  return loss;
}

static void test_train(lockstep_train_world* world, const char* folder) {
  lockstep_train_model* const model = make(world, folder, CONFIGURATION);
  double first = 0;
  batch all;
  fill(&all, 0, 0, 12);
  OK(lockstep_train_evaluate(model, &all.input, 1, &all.target, 1, &first));
  const double last = train(world, model, 20);
  CHECK(last < first / 2);
  printf("weights %.17g loss %.17g\n", fingerprint(model), last);
  OK(lockstep_train_free(model));
}

/* Ten steps, then a checkpoint; another model goes on from it, and so does one from the saved weights. */
static void test_resume(lockstep_train_world* world, const char* folder) {
  char path[1024], checkpoints[1024];
  snprintf(path, sizeof path, "%s/trained.pt", folder);
  snprintf(checkpoints, sizeof checkpoints, "%s/checkpoints", folder);
  lockstep_train_model* const model = make(world, folder, CONFIGURATION);
  int64_t step = -1;
  OK(lockstep_train_resume(model, checkpoints, &step));
  CHECK(step == 0);
  train(world, model, 10);
  OK(lockstep_train_save(model, path));
  OK(lockstep_train_save_checkpoint(model, checkpoints));
  const double at_ten = fingerprint(model);
  train(world, model, 10);
  const double at_twenty = fingerprint(model);
  OK(lockstep_train_free(model));

  lockstep_train_model* const next = make(world, folder, CONFIGURATION);
  OK(lockstep_train_load(next, path));
  CHECK(fingerprint(next) == at_ten);
  OK(lockstep_train_resume(next, checkpoints, &step));
  CHECK(step == 10 && fingerprint(next) == at_ten);
  double rate = 0, rate_before = 0;
  OK(lockstep_train_learning_rate(next, &rate_before));
  train(world, next, 10);
  OK(lockstep_train_learning_rate(next, &rate));
  CHECK(fingerprint(next) == at_twenty && rate < rate_before);
  printf("weights %.17g\n", at_twenty);
  OK(lockstep_train_free(next));
}

/* Batches of different sizes, weighted by their rows; and gradients of several batches together. */
static void test_uneven(lockstep_train_world* world, const char* folder) {
  lockstep_train_model* const model =
      make(world, folder,
           "{\"optimizer\": {\"type\": \"sgd\", \"lr\": 0.1, \"momentum\": 0.9}, \"loss\": \"mse\", \"accumulate\": 2,"
           " \"weight_by_rows\": true, \"max_grad_norm\": 0.5}");
  const int rank = lockstep_train_rank(world), size = lockstep_train_size(world);
  int64_t steps = 0;
  for (int call = 0; call < 20; ++call) {
    const int64_t first = rank == 0 ? 0 : 4, rows = size == 1 ? 12 : rank == 0 ? 4 : 8;
    batch part;
    fill(&part, call, first, rows);
    OK(lockstep_train_step(model, &part.input, 1, &part.target, 1, NULL));
  }
  OK(lockstep_train_steps(model, &steps));
  CHECK(steps == 10);
  printf("weights %.17g\n", fingerprint(model));
}

typedef void tested(lockstep_train_world* world, const char* folder);
static const struct {
  const char* name;
  tested* run;
} tests[] = {
    {"train", test_train},       {"resume", test_resume},       {"uneven", test_uneven},
    {"refusals", test_refusals}, {"files", test_files},         {"settings", test_settings},
    {"handles", test_handles},   {"threads", test_threads},     {"differ", test_ranks_that_differ},
    {"losses", test_losses},     {"intervals", test_intervals}, {"missing", test_missing_call}, {"backward", test_failing_backward}, {"rows", test_rows}, {"machines", test_machines}, {"islands", test_islands}, {"machines_average", test_machines_average}, {"machines_differ", test_machines_that_differ},
};

static void run(const char* test, lockstep_train_world* world, const char* folder, long number) {
  if (strcmp(test, "fuzz") == 0) {
    test_fuzz(world, folder, number);
    return;
  }
  for (size_t i = 0; i < sizeof tests / sizeof *tests; ++i) {
    if (strcmp(test, tests[i].name) != 0) continue;
    tests[i].run(world, folder);
    return;
  }
  CHECK(!"a known test");
}

int main(int argc, char** argv) {
  CHECK(argc >= 3);
  lockstep_train_world* world = NULL;
  lockstep_train_options options = {sizeof options, 0, 0, 0, 0};
  options.timeout_s = strcmp(argv[1], "missing") == 0 ? 2 : 60;
  options.seed = 1;
  CHECK(lockstep_train_version() == 1001);
  CHECK(strcmp(lockstep_train_last_error(), "") == 0);
  OK(lockstep_train_join(&options, &world));
  run(argv[1], world, argv[2], argc > 3 ? strtol(argv[3], NULL, 10) : 0);
  OK(lockstep_train_leave(world));
  return 0;
}
