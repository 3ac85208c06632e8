/* AdamW whose step the ranks share out: weights and state lie once for all ranks, and each steps its part of them. Fits
 * a plane to samples that are each rank's own.   cc sharded_adamw.c -llockstep_c && lockstep run -n 2 -- ./a.out */
#include <lockstep/c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kInputs = 64, kSamples = 128, kSteps = 200 };

static void check(lockstep_status status) {
  if (status == LOCKSTEP_OK) return;
  fprintf(stderr, "%s: %s\n", lockstep_status_name(status), lockstep_last_error());
  exit(1);
}

static float uniform(uint32_t* state) { /* in -0.5 .. 0.5 */
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / 16777216.0f - 0.5f;
}

static float* floats(lockstep_group* group, int together) {
  void* memory;
  check((together ? lockstep_allocate_together : lockstep_allocate)(group, kInputs * sizeof(float), &memory));
  return memory;
}

/* Adds the gradient of a sample, whose target is the sum of its first half; returns its share of the loss. */
static float add_gradient(const float* weights, const float* x, float* gradient) {
  float out = 0, target = 0;
  for (int i = 0; i < kInputs; ++i) {
    out += weights[i] * x[i];
    if (i < kInputs / 2) target += x[i];
  }
  const float error = out - target, slope = 2 * error / kSamples;
  for (int i = 0; i < kInputs; ++i) gradient[i] += slope * x[i];
  return error * error / kSamples;
}

int main(void) {
  lockstep_group* world;
  check(lockstep_join(NULL, &world));
  const int rank = lockstep_rank(world);
  float x[kSamples][kInputs];
  uint32_t random = (uint32_t)rank;
  for (int s = 0; s < kSamples; ++s)
    for (int i = 0; i < kInputs; ++i) x[s][i] = uniform(&random);
  float *weights = floats(world, 1), *exp_avg = floats(world, 1), *exp_avg_sq = floats(world, 1); /* zeros */
  float* gradient = floats(world, 0);
  lockstep_adam adamw = {sizeof adamw, 0, 0.9, 0.999, 1e-8, 1e-2, 1};
  for (int step = 1; step <= kSteps; ++step) {
    float loss = 0;
    for (int i = 0; i < kInputs; ++i) gradient[i] = 0;
    for (int s = 0; s < kSamples; ++s) loss += add_gradient(weights, x[s], gradient);
    adamw.lr = 0.1 * (kSteps + 1 - step) / kSteps;
    check(lockstep_sharded_adam(world, &adamw, step, weights, gradient, exp_avg, exp_avg_sq, NULL, kInputs));
    if (rank == 0 && (step == 1 || step == kSteps)) printf("step %d loss %.9g\n", step, loss);
  }
  uint32_t hash = 2166136261u;
  for (int i = 0; i < kInputs; ++i) {
    uint32_t bits;
    memcpy(&bits, weights + i, sizeof bits);
    hash = (hash ^ bits) * 16777619u;
  }
  if (rank == 0) printf("plane %08x over %d ranks\n", (unsigned)hash, lockstep_size(world));
  check(lockstep_leave(world));
  return 0;
}
