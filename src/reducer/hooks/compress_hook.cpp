#include <ATen/ATen.h>

#include "reducer/hooks/all_reduce_hook.h"

namespace lockstep {
namespace {

class CompressHook : public CommHook {
 public:
  CompressHook(at::ScalarType dtype, CommHookPtr inner) : dtype_(dtype), inner_(std::move(inner)) {}

  Finish reduce(const GradientBucket& bucket, const Group& group) override {
    const bool wider = bucket.gradients.is_floating_point() && bucket.gradients.element_size() > 2;
    if (!wider) return inner_ ? inner_->reduce(bucket, group) : reduce_plainly(bucket.gradients, bucket.op, group);
    const at::Tensor compressed = at::empty_like(bucket.gradients, bucket.gradients.options().dtype(dtype_));
    Finish finish;
    if (inner_) {
      compressed.copy_(bucket.gradients);
      finish = inner_->reduce(seen_in(compressed, bucket), group);
    } else {
      const bool mean = bucket.op == ReduceOp::kMean;
      at::Tensor out = compressed;
      if (mean)
        at::div_out(out, bucket.gradients, at::scalar_tensor(group.world_size(), bucket.gradients.options()));
      else
        out.copy_(bucket.gradients);
      finish = reduce_plainly(compressed, mean ? ReduceOp::kSum : bucket.op, group);
    }
    return [finish = std::move(finish), compressed, gradients = bucket.gradients] {
      finish();
      gradients.copy_(compressed);
    };
  }

  std::string describe() const override { return c10::str("travels as ", dtype_, '\n', described(inner_)); }

  std::optional<at::ScalarType> travels_as(at::ScalarType type) const override {
    if (inner_) return std::nullopt;
    return at::isFloatingType(type) && c10::elementSize(type) > 2 ? dtype_ : type;
  }

  StateDict state_dict() const override { return inner_ ? inner_->state_dict() : StateDict(); }
  void load_state_dict(const StateDict& state) override {
    inner_ ? inner_->load_state_dict(state) : CommHook::load_state_dict(state);
  }
  void load_from_ranks(const std::vector<StateDict>& ranks) override {
    inner_ ? inner_->load_from_ranks(ranks) : CommHook::load_from_ranks(ranks);
  }

 private:
  /// The bucket with `flat` in place of its gradients.
  static GradientBucket seen_in(const at::Tensor& flat, const GradientBucket& bucket) {
    GradientBucket seen{bucket.index, bucket.last, bucket.op, flat, {}};
    const int64_t begin = bucket.gradients.storage_offset();
    for (const at::Tensor& part : bucket.parts)
      seen.parts.push_back(flat.as_strided(part.sizes(), part.strides(), part.storage_offset() - begin));
    return seen;
  }

  const at::ScalarType dtype_;
  const CommHookPtr inner_;
};

}  // namespace

CommHookPtr fp16_compress_hook(CommHookPtr inner) {
  return std::make_shared<CompressHook>(at::kHalf, std::move(inner));
}

CommHookPtr bf16_compress_hook(CommHookPtr inner) {
  return std::make_shared<CompressHook>(at::kBFloat16, std::move(inner));
}

}  // namespace lockstep
