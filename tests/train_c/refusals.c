/* Calls that are wrong on every rank: status and text, and the training goes on. */

#include "check.h"

#include <pthread.h>

static int64_t kBadShape[] = {-1, 3}, kHuge[] = {INT64_C(1) << 40, INT64_C(1) << 40};

/* A call that is refused has not trained. */
static void test_schedule_that_ends(lockstep_train_world* world, const char* folder) {
  lockstep_train_model* const model =
      make(world, folder,
           "// three steps\n{\"optimizer\": {\"type\": \"sgd\", \"lr\": 0.1, \"momentum\": 0.9}, \"loss\": \"mse\","
           " \"lr_scheduler\": {\"type\": \"one_cycle\", \"total_steps\": 3}}");
  batch good;
  int64_t steps = 0;
  fill(&good, 0, 0, 4);
  lockstep_status status = LOCKSTEP_OK;
  double before = 0;
  for (int i = 0; i < 5 && status == LOCKSTEP_OK; ++i) {
    before = fingerprint(model);
    status = lockstep_train_step(model, &good.input, 1, &good.target, 1, NULL);
  }
  CHECK(status == LOCKSTEP_INVALID_ARGUMENT);
  CHECK(strstr(lockstep_train_last_error(), "lockstep_train_step of model") != NULL);
  CHECK(fingerprint(model) == before);
  OK(lockstep_train_steps(model, &steps));
  CHECK(steps >= 2);
  fill(&good, 0, 0, 0);
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "has no rows, so the loss has no mean",
          lockstep_train_evaluate(model, &good.input, 1, &good.target, 1, &before));
  OK(lockstep_train_free(model));
}

/* A model whose checkpoint does not fit stays as it was, and can be trained. */
static void test_other_checkpoint(lockstep_train_world* world, const char* folder) {
  char path[1024];
  batch good;
  fill(&good, 0, 0, 4);
  snprintf(path, sizeof path, "%s/of_adam_%d", folder, lockstep_train_size(world));
  lockstep_train_model* const adam = make(world, folder, CONFIGURATION);
  OK(lockstep_train_step(adam, &good.input, 1, &good.target, 1, NULL));
  OK(lockstep_train_save_checkpoint(adam, path));
  lockstep_train_model* const sgd =
      make(world, folder, "{\"optimizer\": {\"type\": \"sgd\", \"lr\": 0.1}, \"loss\": \"mse\"}");
  const double before = fingerprint(sgd);
  CHECK(before != fingerprint(adam));
  CHECK(lockstep_train_resume(sgd, path, NULL) == LOCKSTEP_TRAIN_FILE_FAILED);
  CHECK(fingerprint(sgd) == before);
  OK(lockstep_train_step(sgd, &good.input, 1, &good.target, 1, NULL));
  OK(lockstep_train_free(sgd));
  OK(lockstep_train_free(adam));
}

void test_refusals(lockstep_train_world* world, const char* folder) {
  lockstep_train_model* const model = make(world, folder, CONFIGURATION);
  const double before = fingerprint(model);
  batch good;
  double loss = 0;
  fill(&good, 0, 0, 4);
  lockstep_train_array bad = good.input;
#define STEP(words, input, count) \
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, words, lockstep_train_step(model, input, count, &good.target, 1, &loss))
  STEP("inputs is null", NULL, 1);
  STEP("the number of inputs is -1", &good.input, -1);
  bad.data = NULL;
  STEP("inputs[0].data is null", &bad, 1);
  bad = good.input, bad.shape = NULL;
  STEP("inputs[0].shape is null", &bad, 1);
  bad = good.input, bad.dimensions = -2;
  STEP("inputs[0].dimensions is -2", &bad, 1);
  bad = good.input, bad.dtype = 99;
  STEP("inputs[0].dtype is 99", &bad, 1);
  bad = good.input, bad.shape = kBadShape;
  STEP("sizes must not be negative", &bad, 1);
  bad = good.input, bad.shape = kHuge;
  STEP("more than memory can hold", &bad, 1);
  bad = good.input, bad.dtype = LOCKSTEP_INT64;
  STEP("of model 1", &bad, 1);                 /* the module refuses it */
  STEP("of model 1", &good.target, 1);         /* [4, 2] where [4, 3] is needed */
  STEP("of model 1", &good.input, 0);          /* too few */
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "their shapes must be equal",
          lockstep_train_step(model, &good.input, 1, &good.input, 1, &loss));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "one output and one target",
          lockstep_train_step(model, &good.input, 1, NULL, 0, &loss));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "loss is null",
          lockstep_train_evaluate(model, &good.input, 1, &good.target, 1, NULL));

  double out[8] = {7, 7, 7, 7, 7, 7, 7, 7};
  int64_t shape[] = {2, 4};
  lockstep_train_array output = {out, shape, 2, LOCKSTEP_FLOAT64};
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "outputs[0] is float64 [2, 4], but the module returns float64 [4, 2]",
          lockstep_train_infer(model, &good.input, 1, &output, 1));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "returns 1 tensors, but there are 0 outputs",
          lockstep_train_infer(model, &good.input, 1, NULL, 0));
  for (int i = 0; i < 8; ++i) CHECK(out[i] == 7);

  CHECK(fingerprint(model) == before); /* nothing of this has trained */
  OK(lockstep_train_step(model, &good.input, 1, &good.target, 1, &loss));
  CHECK(fingerprint(model) != before);
  test_schedule_that_ends(world, folder);
  test_other_checkpoint(world, folder);
}

void test_files(lockstep_train_world* world, const char* folder) {
  char path[1024], other[1024];
  lockstep_train_model* model = (lockstep_train_model*)folder;
  snprintf(path, sizeof path, "%s/none.pt", folder);
  REFUSED(LOCKSTEP_TRAIN_FILE_FAILED, "none.pt cannot be read as TorchScript",
          lockstep_train_create(world, path, CONFIGURATION, &model));
  CHECK(model == NULL);
  snprintf(path, sizeof path, "%s/garbage.pt", folder);
  REFUSED(LOCKSTEP_TRAIN_FILE_FAILED, "garbage.pt cannot be read as TorchScript",
          lockstep_train_create(world, path, CONFIGURATION, &model));
  snprintf(path, sizeof path, "%s/frozen.pt", folder);
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "has no parameters to train",
          lockstep_train_create(world, path, CONFIGURATION, &model));
  snprintf(path, sizeof path, "%s/net.pt", folder);
  REFUSED(LOCKSTEP_TRAIN_FILE_FAILED, "no.json cannot be read",
          lockstep_train_create(world, path, "no.json", &model));

  model = make(world, folder, CONFIGURATION);
  const double before = fingerprint(model);
  REFUSED(LOCKSTEP_TRAIN_FILE_FAILED, "/no folder/net.pt", lockstep_train_save(model, "/no folder/net.pt"));
  snprintf(other, sizeof other, "%s/other.pt", folder);
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "the weights do not fit the model:", lockstep_train_load(model, other));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "folder is empty", lockstep_train_resume(model, "", NULL));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "path is null", lockstep_train_save(model, NULL));
  CHECK(fingerprint(model) == before);

  batch good;
  fill(&good, 0, 0, 4);
  OK(lockstep_train_step(model, &good.input, 1, &good.target, 1, NULL));
  snprintf(other, sizeof other, "%s/late", folder);
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "resume before its first step", lockstep_train_resume(model, other, NULL));
  OK(lockstep_train_save_checkpoint(model, other));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "a model has only one folder", lockstep_train_save_checkpoint(model, folder));
}

void test_settings(lockstep_train_world* world, const char* folder) {
  static const char* const refusals[][2] = {
      {"{", "this is not JSON"},
      {"{}", "it has no loss"},
      {"{\"loss\": \"mse\"}", "it has no optimizer"},
      {"{\"loss\": \"mean\", \"optimizer\": \"sgd\"}", "loss.type is \"mean\"; known are mse,"},
      {"{\"loss\": \"mse\", \"optimizer\": \"sdg\"}", "optimizer.type is \"sdg\"; known are sgd,"},
      {"{\"loss\": \"mse\", \"optimizer\": {\"lr\": 1}}", "no optimizer.type"},
      {"{\"loss\": \"mse\", \"optimizer\": {\"type\": \"sgd\", \"lr\": \"1\"}}", "optimizer.lr is \"1\"; give a number"},
      {"{\"loss\": \"mse\", \"optimizer\": {\"type\": \"sgd\", \"lr\": -1}}", "-1"},
      {"{\"loss\": \"mse\", \"optimizer\": {\"type\": \"sgd\", \"beta1\": 1}}",
       "optimizer.beta1 is not known there; known are type, lr,"},
      {"{\"loss\": \"mse\", \"optimizer\": \"sgd\", \"lr\": 1}", "lr is not known there"},
      {"{\"loss\": \"mse\", \"optimizer\": \"sgd\", \"lr_scheduler\": \"step\"}", "no lr_scheduler.step_size"},
      {"{\"loss\": \"mse\", \"optimizer\": \"sgd\", \"lr_scheduler\": \"steps\"}", "lr_scheduler.type is \"steps\""},
      {"{\"loss\": \"mse\", \"optimizer\": \"sgd\", \"accumulate\": 0}", "accumulate is 0; give a whole number from 1"},
      {"{\"loss\": \"mse\", \"optimizer\": \"sgd\", \"dtype\": \"int8\"}", "dtype is \"int8\""},
      {"{\"loss\": {\"type\": \"mse\", \"reduction\": \"none\"}, \"optimizer\": \"sgd\"}", "give mean or sum"},
      {"{\"loss\": \"mse\", \"optimizer\": \"sgd\", \"checkpoint\": {\"every_steps\": 0.5}}", "checkpoint.every_steps"},
  };
  static const char* const good[] = {
      "{\"loss\": \"l1\", \"optimizer\": {\"type\": \"adamw\", \"weight_decay\": 0.1, \"amsgrad\": true}}",
      "{\"loss\": {\"type\": \"huber\", \"delta\": 2}, \"optimizer\": {\"type\": \"rmsprop\", \"momentum\": 0.5},"
      " \"lr_scheduler\": {\"type\": \"multi_step\", \"milestones\": [2, 4], \"warm_up\": 2}}",
      "{\"loss\": {\"type\": \"smooth_l1\", \"reduction\": \"sum\"}, \"optimizer\": \"adagrad\", // a comment\n"
      " \"lr_scheduler\": {\"type\": \"one_cycle\", \"total_steps\": 9, \"cycle_momentum\": false}}",
      "{\"loss\": \"bce_with_logits\", \"optimizer\": \"adam\", \"check_equal_every\": 1}",
  };
  char path[1024];
  lockstep_train_model* model = NULL;
  snprintf(path, sizeof path, "%s/net.pt", folder);
  for (size_t i = 0; i < sizeof refusals / sizeof *refusals; ++i)
    REFUSED(LOCKSTEP_INVALID_ARGUMENT, refusals[i][1], lockstep_train_create(world, path, refusals[i][0], &model));
  for (size_t i = 0; i < sizeof good / sizeof *good; ++i) {
    model = make(world, folder, good[i]);
    const double before = fingerprint(model);
    batch one;
    fill(&one, 0, 0, 4);
    for (int step = 0; step < 5; ++step) OK(lockstep_train_step(model, &one.input, 1, &one.target, 1, NULL));
    CHECK(fingerprint(model) != before);
  }
}

void test_handles(lockstep_train_world* world, const char* folder) {
  lockstep_train_model* const model = make(world, folder, CONFIGURATION);
  lockstep_train_world* second = world;
  lockstep_train_replica* replica = NULL;
  int64_t steps = 0;
  int stop = 1;
  OK(lockstep_train_stop_requested(world, &stop));
  CHECK(stop == 0);
  CHECK(lockstep_train_join(NULL, &second) != LOCKSTEP_OK && second == NULL);
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "options->size is 3",
          lockstep_train_join(&(lockstep_train_options){3, 0, 0, 0, 0}, &second));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "link liblockstep_train_mpi", lockstep_train_join_mpi_f(0, NULL, &second));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "world is null", lockstep_train_join(NULL, NULL));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "the model is null", lockstep_train_steps(NULL, &steps));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "steps is null", lockstep_train_steps(model, NULL));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "this is not a model", lockstep_train_steps((lockstep_train_model*)world, &steps));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "this is not a model", lockstep_train_steps((lockstep_train_model*)&steps, &steps));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "parameters is null", lockstep_train_attach(world, NULL, NULL, 1, 0, &replica));
  OK(lockstep_train_free(model));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "freed", lockstep_train_free(model));
  OK(lockstep_train_free(NULL));
  OK(lockstep_train_detach(NULL));
  OK(lockstep_train_leave(NULL));
  CHECK(lockstep_train_rank(NULL) == -1 && lockstep_train_size((lockstep_train_world*)&steps) == -1);
  CHECK(strcmp(lockstep_train_status_name(LOCKSTEP_TRAIN_FILE_FAILED), "LOCKSTEP_TRAIN_FILE_FAILED") == 0);
}

/* Steps while another thread infers: refused in one of the two, and every step that succeeds counts. */
struct shared {
  lockstep_train_model* model;
  volatile int done;
  long refused;
};
static void* infer(void* argument) {
  struct shared* const with = argument;
  while (!with->done) {
    batch probe;
    fill(&probe, 0, 0, 4);
    if (lockstep_train_infer(with->model, &probe.input, 1, &probe.target, 1) == LOCKSTEP_OK) continue;
    CHECK(strstr(lockstep_train_last_error(), "another thread") != NULL);
    ++with->refused;
  }
  return NULL;
}
void test_threads(lockstep_train_world* world, const char* folder) {
  struct shared with = {make(world, folder, CONFIGURATION), 0, 0};
  pthread_t thread;
  int64_t steps = 0, counted = 0;
  long refused = 0;
  CHECK(lockstep_train_size(world) == 1);
  CHECK(pthread_create(&thread, NULL, infer, &with) == 0);
  while (steps < 200) {
    batch part;
    fill(&part, (int)steps, 0, 4);
    const lockstep_status status = lockstep_train_step(with.model, &part.input, 1, &part.target, 1, NULL);
    if (status == LOCKSTEP_OK) {
      ++steps;
      continue;
    }
    CHECK(status == LOCKSTEP_INVALID_ARGUMENT && strstr(lockstep_train_last_error(), "another thread") != NULL);
    ++refused;
  }
  with.done = 1;
  CHECK(pthread_join(thread, NULL) == 0);
  OK(lockstep_train_steps(with.model, &counted));
  CHECK(counted == steps && refused + with.refused > 0);
}
