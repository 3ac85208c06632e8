#ifndef LOCKSTEP_TESTS_C_FORMULAS_H
#define LOCKSTEP_TESTS_C_FORMULAS_H

#include <lockstep/c.h>

/* The sharded steps that are tried, on float32 and on the other dtypes; reference.cpp takes the same ones. */
enum { kCount = 70001, kSteps = 5 };
enum { kPlain, kMomentum, kNesterov, kAdam, kAdamW, kFormulas };
static const char* const kNames[] = {"sgd", "momentum", "nesterov", "adam", "adamw"};

static lockstep_sgd sgd_of(int formula, int step) {
  lockstep_sgd sgd = {sizeof sgd, 0, 0, 0, 1e-2, 0};
  sgd.lr = 0.1 / step;
  if (formula == kMomentum || formula == kNesterov) sgd.momentum = 0.9;
  if (formula == kMomentum) sgd.dampening = 0.5;
  sgd.nesterov = formula == kNesterov;
  return sgd;
}

static lockstep_adam adam_of(int formula, int step) {
  lockstep_adam adam = {sizeof adam, 0, 0.9, 0.99, 1e-8, 1e-2, 0};
  adam.lr = 0.01 / step;
  adam.decoupled_weight_decay = formula == kAdamW;
  return adam;
}

#endif
