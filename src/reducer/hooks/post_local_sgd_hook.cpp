#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "reducer/hooks/all_reduce_hook.h"

namespace lockstep {
namespace {

class PostLocalSgdHook : public CommHook {
 public:
  explicit PostLocalSgdHook(PostLocalSgdOptions options) : options_(std::move(options)) {
    TORCH_CHECK(options_.start_iter >= 0, "PostLocalSgdOptions: start_iter must not be negative");
  }

  Finish reduce(const GradientBucket& bucket, const Group& group) override {
    TORCH_CHECK(
        bucket.op == ReduceOp::kMean,
        "post-local SGD needs GradientReduction::kMean: with sums or weighted means, one rank's gradient is only a "
        "part of the result");
    const bool local = iteration_ >= options_.start_iter;
    if (bucket.last) ++iteration_;
    if (!local) return reduce_plainly(bucket.gradients, bucket.op, group);
    if (options_.subgroup) return reduce_plainly(bucket.gradients, bucket.op, *options_.subgroup);
    return [] {};
  }

  std::string describe() const override {
    return c10::str("start_iter ", options_.start_iter, "\nsubgroup ", options_.subgroup.has_value(), '\n');
  }

  StateDict state_dict() const override {
    StateDict state;
    state.insert("iteration", at::scalar_tensor(iteration_, at::kLong));
    return state;
  }
  void load_state_dict(const StateDict& state) override {
    iteration_ = state_entry(state, "iteration").item<int64_t>();
  }

 private:
  const PostLocalSgdOptions options_;
  int64_t iteration_ = 0;
};

}  // namespace

CommHookPtr post_local_sgd_hook(PostLocalSgdOptions options) {
  return std::make_shared<PostLocalSgdHook>(std::move(options));
}

PeriodicModelAverager::PeriodicModelAverager(Group group, int64_t period, int64_t warmup_steps)
    : group_(std::move(group)), period_(period), warmup_steps_(warmup_steps) {
  TORCH_CHECK(period >= 1 && warmup_steps >= 0, "PeriodicModelAverager: period must be at least 1 and warmup_steps ",
              "must not be negative; they are ", period, " and ", warmup_steps);
}

StateDict PeriodicModelAverager::state_dict() const {
  StateDict state;
  state.insert("step", at::scalar_tensor(step_, at::kLong));
  return state;
}

void PeriodicModelAverager::load_state_dict(const StateDict& state) {
  step_ = state_entry(state, "step").item<int64_t>();
}

bool PeriodicModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  const int64_t past = step_++ - warmup_steps_;
  if (past < 0 || past % period_ != 0) return false;
  at::NoGradGuard no_grad;
  std::vector<Work> works;
  for (const at::Tensor& parameter : parameters)
    works.push_back(group_.all_reduce_async(parameter.detach(), ReduceOp::kMean));
  for (const Work& work : works) work.wait();
  return true;
}

}  // namespace lockstep
