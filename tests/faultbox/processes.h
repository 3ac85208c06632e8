#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace lockstep::faultbox {

/// CLOCK_MONOTONIC, which the driver, the ranks and the kernel's timers share.
int64_t now_ns();

std::string read_file(const std::string& path);

/// Polls `condition` every millisecond or so until it holds; false when the time is over.
bool eventually(const std::function<bool()>& condition, std::chrono::milliseconds timeout);

/// Living processes (zombies are not) that were started with `mark`, a NAME=value, in their environment.
std::vector<pid_t> marked_processes(const std::string& mark);

/// The value of a variable in the environment that a process was started with; empty where it has none.
std::string variable_of(pid_t pid, const std::string& name);

/// "4711 S lockstep run -n 2", for a message.
std::string describe_process(pid_t pid);

/// Sockets and names that a run's processes hold while it goes on: what must be gone after it.
struct Holdings {
  std::set<ino_t> sockets;
  std::vector<std::string> named_segments;  ///< files of /dev/shm that are mapped or open
};
Holdings holdings_of(const std::vector<pid_t>& processes);

/// Those of `sockets` that listen, in words; of every kind that still exist if `any_state`.
std::vector<std::string> sockets_in_kernel(const std::set<ino_t>& sockets, bool any_state);

size_t own_descriptors();

/// Waits for all children of this process that have ended and are not in `kept`: orphans of runs, which come to this
/// process because it is a subreaper. Returns those of its children, again not `kept`, that live.
std::vector<pid_t> reap_orphans(const std::set<pid_t>& kept);

}  // namespace lockstep::faultbox
