#ifndef LOCKSTEP_TESTS_TRAIN_C_CHECK_H
#define LOCKSTEP_TESTS_TRAIN_C_CHECK_H

#include <lockstep/train_c.h>

#define LAST_ERROR lockstep_train_last_error
#include "../support/c_check.h"

/* The module net.pt of the folder takes [rows, 3] and returns [rows, 2], in float64. */
#define CONFIGURATION                                                      \
  "{\"optimizer\": {\"type\": \"adam\", \"lr\": 0.05}, \"loss\": \"mse\"," \
  " \"lr_scheduler\": {\"type\": \"cosine_annealing\", \"t_max\": 50}, \"checkpoint\": {\"keep_last\": 3}}"

enum { kInputs = 3, kOutputs = 2, kMostRows = 64 };

/* A batch of doubles; `first` is the number of its first row among the rows of all ranks. */
typedef struct batch {
  double x[kMostRows * kInputs], y[kMostRows * kOutputs];
  int64_t x_shape[2], y_shape[2];
  lockstep_train_array input, target;
} batch;
void fill(batch* of, int step, int64_t first, int64_t rows);

lockstep_train_model* make(lockstep_train_world* world, const char* folder, const char* configuration);
/* The sum of all outputs for a batch that is the same on all ranks, each with its own factor. */
double fingerprint(lockstep_train_model* model);

void test_refusals(lockstep_train_world* world, const char* folder);
void test_files(lockstep_train_world* world, const char* folder);
void test_settings(lockstep_train_world* world, const char* folder);
void test_handles(lockstep_train_world* world, const char* folder);
void test_threads(lockstep_train_world* world, const char* folder);
void test_fuzz(lockstep_train_world* world, const char* folder, long calls);
void test_losses(lockstep_train_world* world, const char* folder);
void test_intervals(lockstep_train_world* world, const char* folder);
void test_failing_backward(lockstep_train_world* world, const char* folder);
void test_rows(lockstep_train_world* world, const char* folder);
void test_missing_call(lockstep_train_world* world, const char* folder);
void test_machines(lockstep_train_world* world, const char* folder);
void test_islands(lockstep_train_world* world, const char* folder);
/* With as many ranks on each machine. */
void test_machines_average(lockstep_train_world* world, const char* folder);
/* The last rank is alone on its machine. */
void test_machines_that_differ(lockstep_train_world* world, const char* folder);
void test_ranks_that_differ(lockstep_train_world* world, const char* folder);

#endif
