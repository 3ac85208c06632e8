#include "base/virtual_ranks.h"

#include <atomic>
#include <utility>

#include "base/error.h"

namespace lockstep {
namespace {

std::atomic<int> current_virtual_rank{-1};

}  // namespace

VirtualRanks::VirtualRanks(int count, int rank, int world_size, int threads, Generator generator,
                           std::vector<std::string> states)
    : count_(count),
      world_size_(world_size),
      threads_(threads),
      block_(block_of(rank, world_size, count)),
      generator_(std::move(generator)),
      states_(std::move(states)) {
  states_.insert(states_.begin(), std::string());
}

int VirtualRanks::current_of_process() { return current_virtual_rank.load(std::memory_order_relaxed); }

std::string& VirtualRanks::state_of(std::optional<int> virtual_rank) {
  return states_[virtual_rank ? static_cast<size_t>(1 + *virtual_rank - block_.first) : 0];
}

void VirtualRanks::change(std::optional<int> to) {
  if (to == current_) return;
  if (to && !block_.contains(*to))
    throw Error("virtual rank " + std::to_string(*to) + " does not belong to this process, which works for " +
                std::to_string(block_.first) + " to " + std::to_string(block_.last - 1));
  const std::optional<int> from = current_;
  for (const Listener& listener : *listeners_) listener(from, to);
  state_of(from) = generator_.read();
  generator_.write(state_of(to));
  current_ = to;
  current_virtual_rank = to.value_or(-1);
}

std::vector<std::string> VirtualRanks::generator_states() const {
  std::vector<std::string> states = states_;
  states[current_ ? static_cast<size_t>(1 + *current_ - block_.first) : 0] = generator_.read();
  return states;
}

void VirtualRanks::set_generator_states(const std::vector<std::string>& states) {
  states_ = states;
  generator_.write(state_of(current_));
}

std::shared_ptr<void> VirtualRanks::listen(Listener listener) {
  const auto place = listeners_->insert(listeners_->end(), std::move(listener));
  return std::shared_ptr<void>(nullptr, [listeners = listeners_, place](void*) { listeners->erase(place); });
}

}  // namespace lockstep
