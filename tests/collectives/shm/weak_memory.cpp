#include "collectives/shm/weak_memory.h"

#include <algorithm>

namespace lockstep::shm {
namespace {

constexpr int kRelaxed = 0, kAcquireOrder = 2, kReleaseOrder = 3, kBoth = 4, kSequential = 5;

bool acquires(int order) { return order == 1 || order == kAcquireOrder || order >= kBoth; }
bool releases(int order) { return order >= kReleaseOrder; }

}  // namespace

void WeakMemory::View::join(const View& other) {
  for (int r = 0; r < kMostRanks; ++r) epochs[r] = std::max(epochs[r], other.epochs[r]);
  if (stores.size() < other.stores.size()) stores.resize(other.stores.size());
  for (size_t i = 0; i < other.stores.size(); ++i) stores[i] = std::max(stores[i], other.stores[i]);
}

uint32_t& WeakMemory::View::of(size_t word) {
  if (stores.size() <= word) stores.resize(word + 1);
  return stores[word];
}

void WeakMemory::track(std::byte* begin, size_t bytes) {
  segments_.push_back({begin, bytes});
  cells_.emplace_back(bytes / kCell + 1);
}

void WeakMemory::begin(unsigned seed, Dropped dropped) {
  random_.seed(seed);
  dropped_ = std::move(dropped);
  locations_.clear();
  race_.clear();
  stale_loads_ = 0;
  sequential_ = {};
  ++execution_;
  for (int r = 0; r < ranks_; ++r) {
    of_[r] = {};
    of_[r].now.epochs[r] = 1;  // what was before is known to all
  }
}

WeakMemory::Location& WeakMemory::location(const void* word, uint64_t newest) {
  const auto [place, is_new] = locations_.try_emplace(word);
  Location& location = place->second;
  if (is_new) {
    const auto segment = static_cast<size_t>(segment_of(word));
    location.name =
        name_of_(segment, static_cast<size_t>(static_cast<const std::byte*>(word) - segments_[segment].begin));
    location.number = locations_.size() - 1;
    location.messages.push_back({newest, {}});
  }
  return location;
}

int WeakMemory::weakened(const Location& location, int order, bool is_store) const {
  if (dropped_.word != location.name) return order;
  if (dropped_.what == Dropped::What::kSequential && order == kSequential)
    return is_store ? kReleaseOrder : kAcquireOrder;
  if (dropped_.what == (is_store ? Dropped::What::kRelease : Dropped::What::kAcquire)) return kRelaxed;
  return order;
}

void WeakMemory::plain(const void* address, size_t bytes, bool writes) {
  const auto segment = static_cast<size_t>(segment_of(address));
  const int me = Scheduler::active->current();
  const View& known = of_[me].now;
  const auto offset = static_cast<size_t>(static_cast<const std::byte*>(address) - segments_[segment].begin);
  for (size_t at = offset / kCell; bytes > 0 && at <= (offset + bytes - 1) / kCell; ++at) {
    Cell& cell = cells_[segment][at];
    if (cell.execution != execution_) cell = {.execution = execution_};
    const auto report = [&](int other, const char* did) {
      if (race_.empty())
        race_ = "rank " + std::to_string(me) + (writes ? " writes" : " reads") + " what rank " + std::to_string(other) +
                did + ", with no order between them: segment " + std::to_string(segment) + ", " +
                name_of_(segment, at * kCell);
    };
    if (cell.writer >= 0 && cell.writer != me && cell.written > known.epochs[cell.writer])
      report(cell.writer, " writes");
    if (writes) {
      for (int r = 0; r < ranks_; ++r)
        if (r != me && cell.read[r] > known.epochs[r]) report(r, " reads");
      cell.writer = me;
      cell.written = known.epochs[me];
    } else {
      cell.read[me] = known.epochs[me];
    }
  }
}

void WeakMemory::acquire(const Message& message, int order) {
  Rank& me = of_[Scheduler::active->current()];
  (acquires(order) ? me.now : me.acquirable).join(message.view);
}

uint64_t WeakMemory::load(const void* word, uint64_t newest, int order) {
  Scheduler::active->before_access(word, false);
  Location& location = this->location(word, newest);
  order = weakened(location, order, false);
  Rank& me = of_[Scheduler::active->current()];
  const auto last = static_cast<uint32_t>(location.messages.size() - 1);
  uint32_t first = me.now.of(location.number);
  if (order == kSequential) first = std::max(first, sequential_.of(location.number));
  uint32_t chosen = last;
  if (first < last && random_() % 2 == 0) {
    chosen = first + static_cast<uint32_t>(random_() % (last - first + 1));
    if (chosen != last) {
      ++stale_loads_;
      Scheduler::active->note_write();  // the store is still under way: it is worth looking again
    }
  }
  me.now.of(location.number) = chosen;
  if (order == kSequential) sequential_.of(location.number) = std::max(sequential_.of(location.number), chosen);
  acquire(location.messages[chosen], order);
  return location.messages[chosen].value;
}

void WeakMemory::publish(Location& location, uint64_t value, int order, const Message* replaced) {
  const int rank = Scheduler::active->current();
  Rank& me = of_[rank];
  const auto number = static_cast<uint32_t>(location.messages.size());
  me.now.of(location.number) = number;
  Message message{value, releases(order) ? me.now : me.released};
  if (replaced != nullptr) message.view.join(replaced->view);
  message.view.of(location.number) = number;
  if (order == kSequential) sequential_.of(location.number) = number;
  location.messages.push_back(std::move(message));
  ++me.now.epochs[rank];  // what comes next is not part of it
}

void WeakMemory::store(const void* word, uint64_t newest, uint64_t value, int order) {
  Scheduler::active->before_access(word, true);
  Location& location = this->location(word, newest);
  publish(location, value, weakened(location, order, true), nullptr);
}

void WeakMemory::exchange(const void* word, uint64_t newest, uint64_t value, int order) {
  Location& location = this->location(word, newest);
  const Message replaced = location.messages.back();
  acquire(replaced, weakened(location, order, false));
  publish(location, value, weakened(location, order, true), &replaced);
}

void WeakMemory::fence(int order) {
  if (dropped_.what == Dropped::What::kFences || Scheduler::active == nullptr || Scheduler::active->current() < 0)
    return;
  Rank& me = of_[Scheduler::active->current()];
  if (acquires(order) && dropped_.what != Dropped::What::kAcquireFences) me.now.join(me.acquirable);
  if (order == kSequential) {
    for (size_t i = 0; i < sequential_.stores.size(); ++i) me.now.of(i) = std::max(me.now.of(i), sequential_.stores[i]);
    for (size_t i = 0; i < me.now.stores.size(); ++i) sequential_.of(i) = std::max(sequential_.of(i), me.now.stores[i]);
  }
  if (releases(order) && dropped_.what != Dropped::What::kReleaseFences) {
    me.released = me.now;
    ++me.now.epochs[Scheduler::active->current()];
  }
}

}  // namespace lockstep::shm
