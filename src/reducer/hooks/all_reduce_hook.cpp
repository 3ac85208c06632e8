#include "reducer/hooks/all_reduce_hook.h"

namespace lockstep {
namespace {

class AllReduceHook : public CommunicationHook {
 public:
  Finish reduce(const GradientBucket& bucket, const Group& group) override {
    return reduce_plainly(bucket.gradients, bucket.op, group);
  }
};

}  // namespace

void CommunicationHook::load_state_dict(const StateDict& state) {
  for (const auto& item : state)
    throw Error("this communication hook remembers nothing, so `" + item.key() + "` cannot be loaded into it");
}

CommunicationHook::Finish reduce_plainly(const at::Tensor& tensor, ReduceOp op, const Group& group) {
  return [work = group.all_reduce_async(tensor, op)] { work.wait(); };
}

const at::Tensor& state_entry(const StateDict& state, const std::string& name) {
  const at::Tensor* found = state.find(name);
  if (found == nullptr) throw Error("the communication hook's state lacks `" + name + "`");
  return *found;
}

CommunicationHookPtr all_reduce_hook() { return std::make_shared<AllReduceHook>(); }

}  // namespace lockstep
