// A program that has LibTorch itself and hands liblockstep_train pointers to its parameters, as a binding for another
// language does. Every rank holds the whole batch, so that it knows what the mean of the gradients must be.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <torch/torch.h>

#undef CHECK  // c10 has one, too
#include "check.h"

namespace {

constexpr int64_t kRows = 6;

struct Trained {
  torch::nn::Linear net{3, 2};
  std::vector<at::Tensor> parameters;
  std::vector<void*> pointers;
  std::vector<const char*> names{"weight", "bias"};

  explicit Trained(int rank) {
    torch::manual_seed(rank);
    net->to(torch::kDouble);
    parameters = net->parameters();
    for (at::Tensor& parameter : parameters) pointers.push_back(&parameter);
  }
  /// Of rows [first, first + rows) of a batch that is the same on all ranks.
  at::Tensor loss(int64_t first, int64_t rows) {
    const at::Tensor x = torch::arange(kRows * 3, torch::kDouble).view({kRows, 3}).sin().narrow(0, first, rows);
    return (net(x) - x.sum(1, true)).square().mean();
  }
  /// The gradients of that loss, by other tensors with the same values.
  std::vector<at::Tensor> expected(int64_t first, int64_t rows) {
    Trained twin(0);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) twin.parameters[i].copy_(parameters[i]);
    const at::AutoGradMode with_gradients(true);
    twin.loss(first, rows).backward();
    return twin.gradients();
  }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> result;
    for (const at::Tensor& parameter : parameters) result.push_back(parameter.grad().clone());
    return result;
  }
};

void compare(const std::vector<at::Tensor>& one, const std::vector<at::Tensor>& other) {
  for (size_t i = 0; i < one.size(); ++i) CHECK(at::allclose(one[i], other[i], 1e-12, 1e-12));
}

void train(lockstep_train_world* world, int32_t when) {
  const int rank = lockstep_train_rank(world), size = lockstep_train_size(world);
  const int64_t rows = kRows / size;
  Trained trained(rank);
  lockstep_train_replica* replica = nullptr;
  OK(lockstep_train_attach(world, trained.pointers.data(), trained.names.data(), 2, when, &replica));
  OK(lockstep_train_check_equal(replica));  // all have rank 0's weights
  torch::optim::SGD optimizer(trained.parameters, 0.1);
  for (int step = 0; step < 5; ++step) {
    const std::vector<at::Tensor> expected = trained.expected(0, kRows);
    optimizer.zero_grad();
    trained.loss(rank * rows, rows).backward();
    if (when == LOCKSTEP_TRAIN_WHEN_CALLED) {
      if (step == 0 && size > 1) CHECK(!at::allclose(trained.parameters[0].grad(), expected[0]));
      OK(lockstep_train_average(replica));
    } else {
      REFUSED(LOCKSTEP_INVALID_ARGUMENT, "averages in backward", lockstep_train_average(replica));
    }
    compare(trained.gradients(), expected);
    optimizer.step();
  }
  OK(lockstep_train_check_equal(replica));
  if (size > 1 && when == LOCKSTEP_TRAIN_WHEN_CALLED) {
    const torch::NoGradGuard no_grad;
    if (rank == 1) trained.parameters[1].add_(1);
    REFUSED(LOCKSTEP_MISMATCH, "bias", lockstep_train_check_equal(replica));
    if (rank == 1) trained.parameters[1].sub_(1);
  }
  OK(lockstep_train_detach(replica));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "freed", lockstep_train_average(replica));
  optimizer.zero_grad();
  trained.loss(rank * rows, rows).backward();  // this rank's alone, as before
  compare(trained.gradients(), trained.expected(rank * rows, rows));
}

void refusals(lockstep_train_world* world) {
  Trained trained(0);
  lockstep_train_replica* replica = nullptr;
  at::Tensor undefined, frozen = torch::zeros({2});
  std::vector<void*> pointers = trained.pointers;
  const auto attach = [&](int64_t count, int32_t when) {
    return lockstep_train_attach(world, pointers.data(), nullptr, count, when, &replica);
  };
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "count is 0", attach(0, 0));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "when is 2", attach(2, 2));
  pointers[1] = nullptr;
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "parameters[1] is null", attach(2, 0));
  pointers[1] = &undefined;
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "parameters[1] is an undefined tensor", attach(2, 0));
  pointers[1] = &frozen;
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "parameters[1] is float32 [2], not a leaf that requires", attach(2, 0));
  if (lockstep_train_size(world) > 1) {
    const bool odd = lockstep_train_rank(world) == 1;
    pointers = trained.pointers;
    REFUSED(LOCKSTEP_MISMATCH, "rank 1 has none", attach(odd ? 1 : 2, 0));
    REFUSED(LOCKSTEP_MISMATCH, "rank 0 has when 0, but rank 1 has when 1", attach(2, odd ? 1 : 0));
  }
  CHECK(replica == nullptr);
}

}  // namespace

int main() {
  lockstep_train_world* world = nullptr;
  OK(lockstep_train_join(nullptr, &world));
  refusals(world);
  train(world, LOCKSTEP_TRAIN_WHEN_CALLED);
  train(world, LOCKSTEP_TRAIN_IN_BACKWARD);
  if (lockstep_train_rank(world) == 0) std::printf("done on %d ranks\n", lockstep_train_size(world));
  OK(lockstep_train_leave(world));
}
