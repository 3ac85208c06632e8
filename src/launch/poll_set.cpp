#include "launch/poll_set.h"

#include <cerrno>

#include "base/error.h"

namespace lockstep {

void PollSet::clear() {
  polled_.clear();
  acts_.clear();
}

void PollSet::add(int fd, short events, Act act) {
  polled_.push_back({.fd = fd, .events = events, .revents = 0});
  acts_.push_back(std::move(act));
}

void PollSet::add_all(const std::function<void(std::vector<pollfd>&)>& append, const Act& act) {
  append(polled_);
  acts_.resize(polled_.size(), act);
}

void PollSet::wait(int timeout_ms) {
  const int ready = ::poll(polled_.data(), polled_.size(), timeout_ms);
  if (ready < 0 && errno != EINTR) throw_errno("polling");
  for (size_t i = 0; ready > 0 && i < polled_.size(); ++i)
    if (polled_[i].revents != 0) acts_[i](polled_[i]);
}

}  // namespace lockstep
