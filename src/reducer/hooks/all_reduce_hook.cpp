#include "reducer/hooks/all_reduce_hook.h"

#include <typeinfo>

#include <ATen/ATen.h>
#include <c10/util/Type.h>

#include "collectives/work.h"

namespace lockstep {
namespace {

class AllReduceHook : public CommHook {
 public:
  Finish reduce(const GradientBucket& bucket, const Group& group) override {
    return reduce_plainly(bucket.gradients, bucket.op, group);
  }
  std::optional<at::ScalarType> travels_as(at::ScalarType type) const override { return type; }
};

}  // namespace

void CommHook::load_state_dict(const StateDict& state) {
  for (const auto& item : state)
    throw Error("this communication hook has no state, so `" + item.key() + "` cannot be loaded into it");
}

void CommHook::load_from_ranks(const std::vector<StateDict>& ranks) {
  TORCH_CHECK(!ranks.empty(), "load_from_ranks: the list of the ranks' states is empty");
  StateDict merged;
  for (const auto& item : ranks.front()) {
    at::Tensor value = item.value();
    if (item.key().starts_with("error")) {
      value = value.clone();
      for (size_t rank = 1; rank < ranks.size(); ++rank) value.add_(state_entry(ranks[rank], item.key()));
      value.div_(static_cast<double>(ranks.size()));
    }
    merged.insert(item.key(), value);
  }
  load_state_dict(merged);
}

CommHook::Finish reduce_plainly(const at::Tensor& tensor, ReduceOp op, const Group& group) {
  return [work = group.all_reduce_async(tensor, op)] { order_after(work); };
}

const at::Tensor& state_entry(const StateDict& state, const std::string& name) {
  const at::Tensor* found = state.find(name);
  if (found == nullptr) throw Error("the communication hook's state lacks `" + name + "`");
  return *found;
}

std::string described(const CommHookPtr& inner) {
  return inner == nullptr ? "inner none\n" : "inner " + c10::demangle(typeid(*inner).name()) + '\n' + inner->describe();
}

CommHookPtr all_reduce_hook() { return std::make_shared<AllReduceHook>(); }

}  // namespace lockstep
