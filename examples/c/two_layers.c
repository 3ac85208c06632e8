/* A two-layer network trained by hand-written loops: each rank has samples of its own, and the gradients are averaged
 * in memory that all ranks see.   cc two_layers.c -llockstep_c && lockstep run -n 2 -- ./a.out */
#include <lockstep/c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kInputs = 8, kHidden = 16, kSamples = 64, kSteps = 200 };

typedef struct {
  float w1[kHidden][kInputs], b1[kHidden], w2[kHidden], b2;
  float loss; /* averaged with the gradients */
} Network;
enum { kFloats = sizeof(Network) / sizeof(float) };

static void check(lockstep_status status) {
  if (status == LOCKSTEP_OK) return;
  fprintf(stderr, "%s: %s\n", lockstep_status_name(status), lockstep_last_error());
  exit(1);
}

static float uniform(uint32_t* state) { /* in -0.5 .. 0.5 */
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / 16777216.0f - 0.5f;
}

static void add_gradient(const Network* net, const float* x, float y, Network* gradient) {
  float hidden[kHidden], out = net->b2;
  for (int h = 0; h < kHidden; ++h) {
    float z = net->b1[h];
    for (int i = 0; i < kInputs; ++i) z += net->w1[h][i] * x[i];
    hidden[h] = z > 0 ? z : 0;
    out += net->w2[h] * hidden[h];
  }
  const float error = out - y, slope = 2 * error / kSamples;
  gradient->loss += error * error / kSamples;
  gradient->b2 += slope;
  for (int h = 0; h < kHidden; ++h) {
    gradient->w2[h] += slope * hidden[h];
    if (hidden[h] <= 0) continue;
    const float back = slope * net->w2[h];
    gradient->b1[h] += back;
    for (int i = 0; i < kInputs; ++i) gradient->w1[h][i] += back * x[i];
  }
}

int main(void) {
  lockstep_group* world;
  check(lockstep_join(NULL, &world));
  const int rank = lockstep_rank(world);
  float x[kSamples][kInputs];
  uint32_t random = (uint32_t)rank;
  for (int s = 0; s < kSamples; ++s)
    for (int i = 0; i < kInputs; ++i) x[s][i] = uniform(&random);
  Network net;
  random = 42; /* the same weights on every rank */
  for (int i = 0; i < kFloats; ++i) ((float*)&net)[i] = uniform(&random);
  void* memory;
  check(lockstep_allocate(world, sizeof(Network), &memory));
  Network* gradient = memory;
  for (int step = 0; step < kSteps; ++step) {
    for (int i = 0; i < kFloats; ++i) ((float*)gradient)[i] = 0;
    for (int s = 0; s < kSamples; ++s) add_gradient(&net, x[s], x[s][0] * x[s][1] + x[s][2], gradient);
    check(lockstep_all_reduce(world, gradient, gradient, kFloats, LOCKSTEP_FLOAT32, LOCKSTEP_MEAN, NULL));
    for (int i = 0; i < kFloats - 1; ++i) ((float*)&net)[i] -= 0.1f * ((float*)gradient)[i];
    if (rank == 0 && (step == 0 || step == kSteps - 1)) printf("step %d loss %.9g\n", step, gradient->loss);
  }
  uint32_t hash = 2166136261u;
  for (int i = 0; i < kFloats - 1; ++i) {
    uint32_t bits;
    memcpy(&bits, (float*)&net + i, sizeof bits);
    hash = (hash ^ bits) * 16777619u;
  }
  if (rank == 0) printf("weights %08x over %d ranks\n", (unsigned)hash, lockstep_size(world));
  check(lockstep_leave(world));
  return 0;
}
