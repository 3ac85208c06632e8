#include "optim/shared_copy_watch.h"

#include <algorithm>

#include <lockstep/error.h>

#include "base/hash.h"
#include "base/rank_names.h"
#include "collectives/storages.h"
#include "optim/common_trouble.h"
#include "rank_page/operation_label.h"

namespace lockstep::detail {
namespace {

std::vector<const void*> storages_of_areas(const Areas& areas) {
  std::vector<at::Tensor> memory;
  for (const Areas::Area& area : areas.areas()) memory.push_back(area.parameters);
  return storages_of(memory);
}

/// How a rank has changed the copy since it was last as all ranks expect.
enum class Change : int64_t {
  kNone,
  kSeen,     ///< its values differ: another rank has changed it, or this one without counting
  kSet,      ///< this library has set it, and nothing came after
  kCounted,  ///< this rank has written it
};

bool any(const std::vector<bool>& flags) { return std::find(flags.begin(), flags.end(), true) != flags.end(); }

}  // namespace

SharedCopyWatch::SharedCopyWatch(const Group& group, const Areas& areas)
    : group_(group),
      areas_(areas),
      samples_(areas.memory()->allocate_together(areas.ranks(), at::kLong)),
      entry_(*this, storages_of_areas(areas)) {
  const OperationLabel label("the memory of a ZeroRedundancyOptimizer");
  slices_written();
  group_.barrier();  // from here on the copy may be changed
  step_ended();
}

SharedCopyWatch::Seen SharedCopyWatch::look() const {
  std::vector<uint64_t> samples;
  for (int rank = 0; rank < areas_.ranks(); ++rank) samples.push_back(sample_of_slices(areas_, rank));
  return seen_of(samples);
}

SharedCopyWatch::Seen SharedCopyWatch::seen_of(const std::vector<uint64_t>& samples) const {
  uint64_t sample = Hash::kStart, versions = 0;
  for (const uint64_t one : samples) sample = Hash::mixed(sample, one);
  for (const Areas::Parameter& parameter : areas_.parameters())
    versions += static_cast<uint64_t>(parameter.tensor._version());
  return {.sample = sample, .versions = versions};
}

void SharedCopyWatch::slices_written() {
  samples_.mutable_data_ptr<int64_t>()[areas_.rank()] = static_cast<int64_t>(sample_of_slices(areas_, areas_.rank()));
}

void SharedCopyWatch::step_ended() {
  const auto* noted = samples_.const_data_ptr<int64_t>();
  seen_ = seen_of(std::vector<uint64_t>(noted, noted + areas_.ranks()));
  set_ = false;
}

void SharedCopyWatch::were_set() {
  seen_ = look();
  set_ = true;
}

std::string SharedCopyWatch::trouble() const {
  const Seen now = look();
  if (now.sample == seen_.sample && now.versions == seen_.versions) return "";
  return "parameters were changed, but not by step() of the ZeroRedundancyOptimizer that was made from this model "
         "with shared_parameters = true: all ranks share one copy of them, so what each rank changes, as another "
         "optimizer does, is changed once for every rank. Let only its step() change them, or destroy it; make any "
         "other change on one rank and then call broadcast_parameters(), with that rank, on every rank";
}

void SharedCopyWatch::before_broadcast(int root) {
  const Seen now = look();
  const Change mine = now.versions != seen_.versions ? Change::kCounted
                      : now.sample != seen_.sample   ? Change::kSeen
                      : set_                         ? Change::kSet
                                                     : Change::kNone;
  const OperationLabel label("broadcast_parameters()");
  const at::Tensor all = group_.all_gather(at::scalar_tensor(static_cast<int64_t>(mine), at::kLong));
  const auto* changes = all.const_data_ptr<int64_t>();
  std::vector<bool> others, seen;
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    const auto change = static_cast<Change>(changes[rank]);
    others.push_back(rank != root && change == Change::kCounted);
    seen.push_back(change == Change::kSeen);
  }
  set_ = false;
  if (any(others))
    throw Error(
        "broadcast_parameters(" + std::to_string(root) + "): " + rank_names(others) +
        " changed the parameters since the last step, but with shared_parameters = true all ranks of a machine "
        "share one copy of them, so what several ranks change is changed several times. Make the change on rank " +
        std::to_string(root) + " alone");
  const auto of_root = static_cast<Change>(changes[root]);
  if (any(seen) && of_root != Change::kCounted && of_root != Change::kSet)
    throw Error("broadcast_parameters(" + std::to_string(root) +
                "): the parameters have changed since the last step, but rank " + std::to_string(root) +
                " has not counted a change of them, so nobody can tell how many ranks made it: what is written through "
                "data() or a pointer, as LibTorch's optimizers do, counts no version. With shared_parameters = true, "
                "change them on that rank alone, by operations on the tensors under torch::NoGradGuard");
}

}  // namespace lockstep::detail
