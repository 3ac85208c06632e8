/* Ranks that differ are told on all ranks, by name, and the training goes on. At least two ranks. */

#include "check.h"

static int rank;

/* MISMATCH, or the odd rank's own status. */
static void told(lockstep_status status, lockstep_status own, const char* words) {
  CHECK(status == (rank == 1 ? own : LOCKSTEP_MISMATCH));
  CHECK(strstr(lockstep_train_last_error(), words) != NULL);
}

static void create(lockstep_train_world* world, const char* folder) {
  char path[1024];
  lockstep_train_model* model = NULL;
  snprintf(path, sizeof path, "%s/net.pt", folder);
  told(lockstep_train_create(world, path,
                             rank == 1 ? "{\"loss\": \"mse\", \"optimizer\": {\"type\": \"sgd\", \"lr\": 0.2}}"
                                       : "{\"loss\": \"mse\", \"optimizer\": {\"type\": \"sgd\", \"lr\": 0.1}}",
                             &model),
       LOCKSTEP_MISMATCH, "rank 0 has optimizer/lr 0.1, but rank 1 has optimizer/lr 0.2");
  CHECK(model == NULL);
  told(lockstep_train_create(world, path,
                             rank == 1 ? "{\"loss\": \"mse\", \"optimizer\": \"adam\"}"
                                       : "{\"loss\": \"mse\", \"optimizer\": \"sgd\"}",
                             &model),
       LOCKSTEP_MISMATCH, "rank 0 has optimizer/type \"sgd\", but rank 1 has optimizer/type \"adam\"");
  snprintf(path, sizeof path, "%s/%s.pt", folder, rank == 1 ? "twice" : "net");
  told(lockstep_train_create(world, path, CONFIGURATION, &model), LOCKSTEP_MISMATCH, "the module's code with hash");
  snprintf(path, sizeof path, "%s/%s.pt", folder, rank == 1 ? "none" : "net");
  CHECK(lockstep_train_create(world, path, CONFIGURATION, &model) == LOCKSTEP_TRAIN_FILE_FAILED);
  CHECK(strstr(lockstep_train_last_error(), "none.pt cannot be read as TorchScript") != NULL);
  CHECK(rank == 1 || strstr(lockstep_train_last_error(), "failed on rank 1") != NULL);
}

static void step(lockstep_train_model* model, const char* folder) {
  char path[1024];
  batch part;
  fill(&part, 0, 4 * rank, 4);
  snprintf(path, sizeof path, "%s/never.pt", folder);
  told(rank == 1 ? lockstep_train_save(model, path)
                 : lockstep_train_step(model, &part.input, 1, &part.target, 1, NULL),
       LOCKSTEP_MISMATCH, "rank 1 calls lockstep_train_save of model 1 while rank 0 calls lockstep_train_step of model 1");
  FILE* const file = fopen(path, "r");
  CHECK(file == NULL);
  fill(&part, 0, 4 * rank, rank == 1 ? 5 : 4);
  told(lockstep_train_step(model, &part.input, 1, &part.target, 1, NULL), LOCKSTEP_MISMATCH,
       "rank 0 has inputs[0] float64 [4, 3], but rank 1 has inputs[0] float64 [5, 3]");
  fill(&part, 0, 4 * rank, 4);
  if (rank == 1) part.input.dtype = LOCKSTEP_INT64;
  told(lockstep_train_step(model, &part.input, 1, &part.target, 1, NULL), LOCKSTEP_INVALID_ARGUMENT,
       rank == 1 ? "lockstep_train_step of model 1: " : "lockstep_train_step of model 1 failed on rank 1: ");
}

/* What rank 1 gets wrong before it could tell anybody: the others do not wait for it. */
static void own_mistakes(lockstep_train_world* world, lockstep_train_model* model, const char* folder) {
  char path[1024];
  int stop = 0;
  double loss = 0;
  batch part;
  lockstep_train_model* other = NULL;
  const int wrong = rank == 1;
  snprintf(path, sizeof path, "%s/net.pt", folder);
#define OWN(words, call) told(call, LOCKSTEP_INVALID_ARGUMENT, words)
  fill(&part, 0, 4 * rank, 4);
  if (wrong) part.input.data = NULL;
  OWN("lockstep_train_step: inputs[0].data is null", lockstep_train_step(model, &part.input, 1, &part.target, 1, &loss));
  CHECK(wrong || strstr(lockstep_train_last_error(), "failed on rank 1: ") != NULL);
  fill(&part, 0, 4 * rank, 4);
  OWN("the number of inputs is -1",
      lockstep_train_evaluate(model, &part.input, wrong ? -1 : 1, &part.target, 1, &loss));
  OWN("loss is null", lockstep_train_evaluate(model, &part.input, 1, &part.target, 1, wrong ? NULL : &loss));
  OWN("path is null", lockstep_train_save(model, wrong ? NULL : path));
  OWN("path is null", lockstep_train_load(model, wrong ? NULL : path));
  OWN("folder is null", lockstep_train_save_checkpoint(model, wrong ? NULL : folder));
  OWN("folder is null", lockstep_train_resume(model, wrong ? NULL : folder, NULL));
  OWN("configuration is null", lockstep_train_create(world, path, wrong ? NULL : CONFIGURATION, &other));
  OWN("model is null", lockstep_train_create(world, path, CONFIGURATION, wrong ? NULL : &other));
  OWN("stop is null", lockstep_train_stop_requested(world, wrong ? NULL : &stop));
  OWN(wrong ? "the model is null" : "rank 1 calls lockstep_train_step with a handle that is refused",
      lockstep_train_step(wrong ? NULL : model, &part.input, 1, &part.target, 1, &loss));
  OWN(wrong ? "the world is null" : "rank 1 calls lockstep_train_stop_requested with a handle that is refused",
      lockstep_train_stop_requested(wrong ? NULL : world, &stop));
  told(wrong ? lockstep_train_stop_requested(world, &stop)
             : lockstep_train_step(model, &part.input, 1, &part.target, 1, &loss),
       LOCKSTEP_MISMATCH, "rank 1 calls lockstep_train_stop_requested while rank 0 calls lockstep_train_step of model 1");
  OK(lockstep_train_stop_requested(world, &stop));
}

void test_ranks_that_differ(lockstep_train_world* world, const char* folder) {
  rank = lockstep_train_rank(world);
  CHECK(lockstep_train_size(world) > 1);
  create(world, folder);
  lockstep_train_model* const model = make(world, folder, CONFIGURATION);
  const double before = fingerprint(model);
  step(model, folder);
  own_mistakes(world, model, folder);
  CHECK(fingerprint(model) == before);
  batch part;
  double loss = 0;
  fill(&part, 0, 4 * rank, 4);
  OK(lockstep_train_step(model, &part.input, 1, &part.target, 1, &loss));
  CHECK(fingerprint(model) != before);
  printf("weights %.17g\n", fingerprint(model));
  if (rank == 1) return; /* and leaves, while the others train */
  CHECK(lockstep_train_step(model, &part.input, 1, &part.target, 1, &loss) == LOCKSTEP_RANK_GONE);
  CHECK(strstr(lockstep_train_last_error(), "rank 1") != NULL);
}
