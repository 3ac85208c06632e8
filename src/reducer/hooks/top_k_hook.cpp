#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include <ATen/ATen.h>

#include "reducer/hooks/all_reduce_hook.h"

namespace lockstep {
namespace {

class TopKHook : public CommHook {
 public:
  explicit TopKHook(const TopKOptions& options) : options_(options) {
    TORCH_CHECK(options.density > 0 && options.density <= 1 && options.start_iter >= 0,
                "TopKOptions: density must be in (0, 1] and start_iter must not be negative; they are ",
                options.density, " and ", options.start_iter);
  }

  Finish reduce(const GradientBucket& bucket, const Group& group) override {
    const bool compress = iteration_ >= options_.start_iter && bucket.gradients.is_floating_point();
    if (bucket.last) ++iteration_;
    const at::Tensor& gradients = bucket.gradients;
    if (!compress || gradients.numel() == 0) return reduce_plainly(gradients, bucket.op, group);
    if (options_.use_error_feedback) {
      at::Tensor& error = errors_[bucket.index];
      TORCH_CHECK(!error.defined() || error.numel() == gradients.numel(),
                  "top-k: the buckets differ from those with which its state was saved");
      if (error.defined()) gradients.add_(error);
    }
    int64_t elements = 0;  // without the gaps
    for (const at::Tensor& part : bucket.parts) elements += part.numel();
    const auto wanted = static_cast<int64_t>(std::ceil(options_.density * static_cast<double>(elements)));
    const int64_t count = std::clamp<int64_t>(wanted, 1, gradients.numel());
    const at::Tensor places = std::get<1>(gradients.abs().topk(count, 0, /*largest=*/true, /*sorted=*/false));
    const at::Tensor values = gradients.index_select(0, places);
    if (options_.use_error_feedback) {
      errors_[bucket.index] = gradients.clone();
      errors_[bucket.index].index_fill_(0, places, 0);
    }
    const int64_t ranks = group.world_size();
    const at::Tensor all_places = at::empty({ranks, count}, places.options());
    const at::Tensor all_values = at::empty({ranks, count}, values.options());
    const Work places_work = group.all_gather_async(all_places, places);
    const Work values_work = group.all_gather_async(all_values, values);
    return [=, op = bucket.op] {
      places_work.wait();
      values_work.wait();
      gradients.zero_();
      // Rank by rank, with each position at most once per rank, so that all ranks add in the same order.
      for (int64_t rank = 0; rank < ranks; ++rank) gradients.index_add_(0, all_places[rank], all_values[rank]);
      if (op == ReduceOp::kMean) gradients.div_(ranks);
    };
  }

  std::string describe() const override {
    return c10::str("density ", options_.density, "\nstart_iter ", options_.start_iter, "\nuse_error_feedback ",
                    options_.use_error_feedback, '\n');
  }

  StateDict state_dict() const override {
    StateDict state;
    state.insert("iteration", at::scalar_tensor(iteration_, at::kLong));
    for (const auto& [index, error] : errors_) state.insert("error." + std::to_string(index), error);
    return state;
  }

  void load_state_dict(const StateDict& state) override {
    iteration_ = state_entry(state, "iteration").item<int64_t>();
    errors_.clear();
    for (const auto& item : state) {
      if (item.key().starts_with("error."))
        errors_[std::stoll(item.key().substr(6))] = item.value().clone();
      else if (item.key() != "iteration")
        throw Error("the state of a top-k hook has no entry `" + item.key() + "`");
    }
  }

 private:
  const TopKOptions options_;
  int64_t iteration_ = 0;
  std::map<int64_t, at::Tensor> errors_;  ///< by bucket, this rank's
};

}  // namespace

CommHookPtr top_k_hook(const TopKOptions& options) { return std::make_shared<TopKHook>(options); }

}  // namespace lockstep
