#include "optim/shared_copy_watch.h"

#include <algorithm>
#include <atomic>

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

/// How a rank has changed the copy since all ranks last agreed on it.
enum class Change : int64_t {
  kNone,
  kSeen,     ///< its values differ: another rank has changed it, or this one without counting
  kSet,      ///< this library has set it, and nothing else has changed it since
  kCounted,  ///< this rank has written it
};

constexpr const char* kChanged =
    "parameters were changed, but not by step() of the ZeroRedundancyOptimizer that was made from this model with "
    "shared_parameters = true: all ranks share one copy of them, so a change that each rank makes, such as a step of "
    "another optimizer or torch::load(), is made once for every rank";

/// For words that another rank may read at any time.
uint64_t read(uint64_t& word) { return std::atomic_ref<uint64_t>(word).load(std::memory_order_relaxed); }
void write(uint64_t& word, uint64_t value) { std::atomic_ref<uint64_t>(word).store(value, std::memory_order_relaxed); }

bool any(const std::vector<bool>& flags) { return std::find(flags.begin(), flags.end(), true) != flags.end(); }

}  // namespace

SharedCopyWatch::SharedCopyWatch(const Group& group, const Areas& areas)
    : group_(group),
      areas_(areas),
      notes_(areas.memory()->allocate_together(areas.ranks() * static_cast<int64_t>(sizeof(Note) / sizeof(int64_t)),
                                               at::kLong)),
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

bool SharedCopyWatch::changed() const {
  const Seen now = look();
  return now.sample != seen_.sample || now.versions != seen_.versions;
}

void SharedCopyWatch::slices_written() { write(own_note().sample, sample_of_slices(areas_, areas_.rank())); }

void SharedCopyWatch::step_ended() {
  std::vector<uint64_t> samples;
  for (int rank = 0; rank < areas_.ranks(); ++rank) samples.push_back(read(note_of(rank).sample));
  seen_ = seen_of(samples);
  ++period_;
}

uint64_t SharedCopyWatch::loaded_by(int rank) const {
  return read(note_of(rank).period) == period_ ? read(note_of(rank).loaded) : 0;
}

void SharedCopyWatch::were_set(const std::vector<const void*>& /*storages*/, uint64_t values) {
  seen_ = look();
  const uint64_t before = loaded();
  write(own_note().loaded, Hash::mixed(before == 0 ? Hash::kStart : before, values));
  write(own_note().period, period_);
}

std::string SharedCopyWatch::of_loads() const {
  std::vector<uint64_t> loads;
  for (int rank = 0; rank < areas_.ranks(); ++rank) loads.push_back(loaded_by(rank));
  const uint64_t first = *std::find_if(loads.begin(), loads.end() - 1, [](uint64_t one) { return one != 0; });
  if (std::all_of(loads.begin(), loads.end(), [&](uint64_t one) { return one == first; })) return "";
  std::vector<bool> with, others;
  for (const uint64_t one : loads) {
    with.push_back(one == first);
    others.push_back(one != first);
  }
  const bool some_did_not = std::find(loads.begin(), loads.end(), 0) != loads.end();
  return std::string(some_did_not ? "a state was loaded into" : "different states were loaded into") +
         " the parameters on " + rank_names(with) + (some_did_not ? " and not, or another, on " : " and on ") +
         rank_names(others) + kLoadTheSame;
}

std::string SharedCopyWatch::trouble() const {
  if (!changed()) return "";
  if (std::string loads = areas_.ranks() == group_.world_size() ? of_loads() : ""; !loads.empty()) return loads;
  return std::string(kChanged) +
         ". Let only its step() change them, or destroy it; make any other change on one rank and then call "
         "broadcast_parameters(), with that rank, on every rank";
}

std::string SharedCopyWatch::trouble_at_end() const {
  if (!changed()) return "";
  return std::string(kChanged) +
         ", and that optimizer was destroyed, so each rank has kept the result. Set the parameters again on every "
         "rank, by load_state_dict() or Checkpointer::resume()";
}

void SharedCopyWatch::before_broadcast(int root) {
  const Seen now = look();
  const Change mine = now.versions != seen_.versions ? Change::kCounted
                      : now.sample != seen_.sample   ? Change::kSeen
                      : loaded() != 0                ? Change::kSet
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
  ++period_;
  if (any(others))
    throw Error(
        "broadcast_parameters(" + std::to_string(root) + "): " + rank_names(others) +
        " changed the parameters since the last step, but with shared_parameters = true all ranks of a machine share "
        "one copy of them, so a change that several ranks make is made several times. Make the change on rank " +
        std::to_string(root) + " alone");
  const auto of_root = static_cast<Change>(changes[root]);
  if (any(seen) && of_root != Change::kCounted && of_root != Change::kSet)
    throw Error("broadcast_parameters(" + std::to_string(root) +
                "): the parameters have changed since the last step, but rank " + std::to_string(root) +
                " has not counted a change of them, so it is unknown how many ranks made it: a write through data() or "
                "a pointer, as by LibTorch's optimizers, counts no version. With shared_parameters = true, change them "
                "on that rank alone, by operations on the tensors under torch::NoGradGuard");
}

}  // namespace lockstep::detail
