#include "fully_sharded/gathering.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "rank_page/operation_label.h"

namespace lockstep::fully_sharded {

Gathering::Gathering(const MachineGroups& groups, std::deque<Unit>& units, UseCheck& check,
                     const FullyShardedOptions& options)
    : groups_(groups), units_(units), check_(check), options_(options) {
  int64_t largest = 0;
  for (const Unit& unit : units_)
    if (!unit.stays_gathered()) largest = std::max(largest, unit.bytes());
  if (largest == 0) return;
  slots_.resize(options_.keep_gathered ? units_.size() : static_cast<size_t>(options_.prefetch) + 1);
  for (size_t i = 0; i < slots_.size(); ++i)
    if (!options_.keep_gathered || !units_[i].stays_gathered())
      slots_[i].memory = groups_.allocate_together(options_.keep_gathered ? units_[i].bytes() : largest, at::kByte);
}

Gathering::~Gathering() {
  for (Slot& slot : slots_) {
    if (!slot.under_way) continue;
    try {  // no transfer may write into memory that is being freed
      slot.under_way->rows.wait();
    } catch (const std::exception&) {  // the training code has been told already, or no longer exists
    }
  }
}

Gathering::Slot* Gathering::slot_of(size_t unit) {
  const auto found = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& slot) { return slot.unit == unit; });
  return found == slots_.end() ? nullptr : &*found;
}

at::Tensor Gathering::memory_of(const Slot& slot) const {
  const Unit& unit = units_[*slot.unit];
  return slot.memory.narrow(0, 0, unit.bytes()).view(unit.dtype());
}

void Gathering::start(Slot& slot, size_t number, What what) {
  const OperationLabel label("the gathering of a unit");
  const Unit& unit = units_[number];
  slot.unit = number;
  const at::Tensor piece = unit.piece_of(memory_of(slot)).view({groups_.machines(), unit.slice_elements()});
  UseCheck::Sent word = check_.send(*groups_.rail(), number, what);
  slot.under_way.emplace(Slot::UnderWay{groups_.rail()->all_gather_async(piece, unit.slice()), std::move(word)});
  ++gathers_;
  bytes_sent_ += groups_.bytes_sent(unit.slice_bytes());
}

void Gathering::finish(Slot& slot) {
  if (!slot.under_way) return;
  const Slot::UnderWay under_way = std::move(*slot.under_way);
  slot.under_way.reset();
  check_.finish_before(under_way.word, under_way.rows);
}

Gathering::Slot& Gathering::free_slot(size_t for_unit, const std::vector<size_t>& needed) {
  if (options_.keep_gathered) return slots_[for_unit];
  const auto is_free = [&](const Slot& slot) {
    return &slot != last_ && (!slot.unit || std::find(needed.begin(), needed.end(), *slot.unit) == needed.end());
  };
  const auto found = std::find_if(slots_.begin(), slots_.end(), is_free);
  return found == slots_.end() ? slots_.front() : *found;
}

Gathering::Slot& Gathering::bring(size_t unit, What what) {
  Slot* slot = slot_of(unit);
  const bool expected = slot != nullptr;
  if (expected) finish(*slot);
  // All ranks of the machine have left the previous unit, and their rails' pieces of this one have arrived.
  if (groups_.here() != nullptr) check_.meet(*groups_.here(), unit, what);
  if (!expected) {
    slot = &free_slot(unit, {});
    finish(*slot);
    start(*slot, unit, what);
    finish(*slot);
    if (groups_.here() != nullptr) check_.meet(*groups_.here(), unit, what);
  }
  last_ = slot;
  return *slot;
}

void Gathering::start_next(const Use& use) {
  std::vector<size_t> needed;
  auto place = learned_.find(use);
  for (int ahead = 0; ahead < options_.prefetch && place != learned_.end(); ++ahead) {
    const size_t next = place->second.second;
    if (slot_of(next) == nullptr) {
      Slot& slot = free_slot(next, needed);
      finish(slot);
      start(slot, next, What::kForward);
    }
    needed.push_back(next);
    place = learned_.find(place->second);
  }
}

void Gathering::use(size_t number, What what, bool learn) {
  const Use use{what, number};
  if (open_ && *open_ != number) close(*open_);
  if (learn && learned_last_) learned_[*learned_last_] = use;
  // Until a backward has been seen, it is assumed to use the units of forward in reverse.
  if (learn && learned_last_ && what == What::kForward && learned_last_->first == What::kForward)
    learned_.try_emplace({What::kBackward, number}, Use{What::kBackward, learned_last_->second});
  if (learn) learned_last_ = use;
  Slot& slot = bring(number, what);
  units_[number].open(memory_of(slot));
  open_ = number;
  start_next(use);
}

void Gathering::close(size_t unit) {
  if (open_ != unit) return;
  units_[unit].close();
  open_.reset();
}

const at::Tensor& Gathering::read(size_t unit) {
  if (open_) close(*open_);
  return bring(unit, What::kForward).memory;
}

void Gathering::forget() {
  if (open_) close(*open_);
  for (Slot& slot : slots_) {
    finish(slot);
    slot.unit.reset();
  }
}

int64_t Gathering::bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_)
    if (slot.memory.defined()) bytes += slot.memory.numel();
  return bytes;
}

}  // namespace lockstep::fully_sharded
