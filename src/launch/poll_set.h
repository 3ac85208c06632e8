#pragma once

#include <poll.h>

#include <functional>
#include <vector>

namespace lockstep {

/// The descriptors that one turn of a poll loop waits for, each with a callback.
class PollSet {
 public:
  using Act = std::function<void(const pollfd&)>;

  void clear();
  void add(int fd, short events, Act act);
  /// Adds all descriptors that `append` supplies, with one common callback.
  void add_all(const std::function<void(std::vector<pollfd>&)>& append, const Act& act);
  /// Waits until a descriptor is ready, or for `timeout_ms` (-1: no limit), and calls the callbacks of ready ones in
  /// the order in which they were added. A callback must not add descriptors.
  void wait(int timeout_ms);

 private:
  std::vector<pollfd> polled_;
  std::vector<Act> acts_;  // one for each element of polled_
};

}  // namespace lockstep
