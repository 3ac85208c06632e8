#include <algorithm>

#include <ATen/ATen.h>

#include "base/machine_name.h"
#include "base/rank_names.h"
#include "collectives/group_state.h"
#include "collectives/hierarchical/layout.h"
#include "reducer/hooks/all_reduce_hook.h"

// A bucket goes through three groups, one after the other:
//
//   inside     the ranks of a machine: the sum of their gradients, to the first rank, which leads the machine
//   between    the machines' leaders: the inner hook, on these sums
//   inside     the result, from the leader to all ranks of its machine
//
// The inner hook needs a finished sum, so a bucket's sum is awaited when the next bucket arrives, or when backward has
// ended. By then it is usually done, and the inner hook's messages are in flight while backward continues.

namespace lockstep {
namespace {

/// In the saved state: whether this rank led its machine. Only leaders' inner hooks have state.
constexpr const char* kLeads = "leads_machine";
/// No rank has led yet, or every rank has the same state.
constexpr int64_t kFollowed = 0, kLed = 1, kAnyPlace = 2;

class BetweenMachinesHook : public CommHook {
 public:
  explicit BetweenMachinesHook(CommHookPtr inner) : inner_(std::move(inner)) {
    TORCH_CHECK(inner_ != nullptr,
                "between_machines_hook: give it the hook that works between machines, such as fp16_compress_hook()");
  }

  Finish reduce(const GradientBucket& bucket, const Group& group) override {
    if (!group_ || &state_of(*group_) != &state_of(group)) find_machines(group);
    if (machines_ == 1) return reduce_plainly(bucket.gradients, bucket.op, group);
    if (machines_ == group.world_size()) return inner_->reduce(bucket, group);
    start_last();
    auto part = std::make_shared<Part>(bucket, inside_->reduce_async(bucket.gradients, 0, ReduceOp::kSum));
    last_ = part;
    return [this, part] {
      start_last();
      if (part->finish) part->finish();
      inside_->broadcast(part->bucket.gradients);
    };
  }

  std::string describe() const override { return described(inner_); }

  StateDict state_dict() const override {
    StateDict state = inner_->state_dict();
    if (!state.is_empty()) state.insert(kLeads, at::scalar_tensor(place_, at::kLong));
    return state;
  }
  void load_state_dict(const StateDict& state) override {
    inner_->load_state_dict(without_place(state));
    place_ = place_in(state);
    group_.reset();  // the next reduction compares the positions
  }
  void load_from_ranks(const std::vector<StateDict>& ranks) override {
    std::vector<StateDict> of_leaders;
    for (const StateDict& state : ranks)
      if (place_in(state) != kFollowed) of_leaders.push_back(without_place(state));
    inner_->load_from_ranks(of_leaders);
    place_ = kAnyPlace;
    group_.reset();
  }

 private:
  struct Part {
    Part(GradientBucket of, Work made) : bucket(std::move(of)), sum(std::move(made)) {}

    GradientBucket bucket;
    Work sum;       ///< over the ranks of the machine
    Finish finish;  ///< the inner hook's; empty on ranks that do not lead
    bool is_started = false;
  };

  static int64_t place_in(const StateDict& state) {
    return state.is_empty() ? kAnyPlace : state_entry(state, kLeads).item<int64_t>();
  }
  static StateDict without_place(const StateDict& state) {
    StateDict inner;
    for (const auto& item : state)
      if (item.key() != kLeads) inner.insert(item.key(), item.value());
    return inner;
  }

  /// REQUIRES: every rank calls it.
  void find_machines(const Group& group) {
    std::vector<std::string> machines;
    std::vector<int> followed;
    for (const std::string& text : group.all_gather_bytes(std::to_string(place_) + machine_name())) {
      if (text[0] == '0' + kFollowed) followed.push_back(static_cast<int>(machines.size()));
      machines.push_back(text.substr(1));
    }
    const auto layout = hierarchical_engine::Layout::of(group.rank(), machines);
    std::vector<int> leaders;
    for (const auto& ranks : layout.ranks) leaders.push_back(ranks.front());
    for (const int leader : leaders)
      if (std::find(followed.begin(), followed.end(), leader) != followed.end())
        throw Error("the communication hook between machines: " + rank_names(std::vector<int>{leader}) +
                    " is now the first rank of its machine, and was not when the hook's state was saved; start the "
                    "ranks on the machines as before, or load the state with load_from_ranks");
    inside_.reset(), between_.reset();
    if (layout.machines() > 1 && layout.machines() < group.world_size()) {
      for (const auto& ranks : layout.ranks)
        if (auto made = group.subgroup(ranks)) inside_ = made;
      between_ = group.subgroup(leaders);
    }
    machines_ = layout.machines();
    share_ = static_cast<double>(machines_) / group.world_size();
    const bool leads = layout.local() == 0 || machines_ == 1;
    place_ = leads ? kLed : kFollowed;
    group_ = group;
  }

  /// Passes the machine's sum of the last bucket to the inner hook, unless that is done or its backward has failed.
  void start_last() {
    const std::shared_ptr<Part> part = last_.lock();
    if (!part || part->is_started) return;
    part->is_started = true;
    part->sum.wait();
    if (!between_) return;
    // The mean of these over the machines is the mean over the ranks.
    if (part->bucket.op == ReduceOp::kMean) part->bucket.gradients.mul_(share_);
    part->finish = inner_->reduce(part->bucket, *between_);
  }

  const CommHookPtr inner_;
  int64_t place_ = kAnyPlace;
  std::optional<Group> group_;             ///< to which the following members belong
  std::optional<Group> inside_, between_;  ///< between_: on leaders
  int machines_ = 0;
  double share_ = 1;  ///< machines per rank
  std::weak_ptr<Part> last_;
};

}  // namespace

CommHookPtr between_machines_hook(CommHookPtr inner) { return std::make_shared<BetweenMachinesHook>(std::move(inner)); }

}  // namespace lockstep
