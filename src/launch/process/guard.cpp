#include "launch/process/guard.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/process_search.h"
#include "launch/launch_error.h"

namespace lockstep {
namespace {

/// After the launcher's end. Each pass inspects all processes.
constexpr std::chrono::milliseconds kStraysTime(2000);

std::string new_launcher_mark() {
  return "LOCKSTEP_LAUNCHER_" + std::to_string(::getpid()) + "_" +
         std::to_string(Clock::now().time_since_epoch().count()) + "=1";
}

/// A killed process may just have started others. An orphan is adopted by the launcher, which would keep it as a
/// zombie.
void kill_marked(const std::string& mark, std::chrono::milliseconds timeout) {
  const Deadline deadline(timeout);
  std::set<pid_t> killed;
  const auto wait = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
  for (;;) {
    const auto left = processes_with(mark, std::chrono::milliseconds(deadline.remaining_ms()));
    for (const pid_t pid : left) ::kill(pid, SIGKILL);
    killed.insert(left.begin(), left.end());
    if (left.empty() || deadline.passed()) break;
    wait();
  }
  const auto is_reaped = [](pid_t pid) { return ::waitpid(pid, nullptr, WNOHANG) != 0; };
  for (;;) {
    std::erase_if(killed, is_reaped);
    if (killed.empty() || deadline.passed()) return;
    wait();
  }
}

void kill_all(const std::vector<pid_t>& groups, const std::string& mark) {
  for (const pid_t left : groups) ::kill(-left, SIGKILL);
  kill_marked(mark, kStraysTime);
}

/// The guard's process: reads groups (negative: to forget) until the launcher is gone.
[[noreturn]] void keep_guard(int pipe, int patience_ms, const std::string& mark) {
  // Out of reach of signals to the launcher's group, and without the launcher's descriptors.
  ::setsid();
  ::prctl(PR_SET_NAME, "lockstep-guard");
  ::dup2(pipe, 0);
  ::close_range(1, ~0U, 0);
  std::vector<pid_t> groups;
  pid_t group;
  for (;;) {
    pollfd polled{.fd = 0, .events = POLLIN, .revents = 0};
    if (patience_ms > 0 && ::poll(&polled, 1, patience_ms) == 0) {
      kill_all(std::exchange(groups, {}), mark);
      continue;
    }
    const ssize_t count = ::read(0, &group, sizeof group);
    if (count < 0 && errno == EINTR) continue;
    if (count != sizeof group) break;
    if (group > 0)
      groups.push_back(group);
    else if (group < 0)
      std::erase(groups, -group);
  }
  kill_all(groups, mark);
  ::_exit(0);
}

}  // namespace

Guard::Guard(std::chrono::milliseconds patience) : patience_(patience), mark_(new_launcher_mark()) { start(); }

void Guard::renew() {
  if (::waitpid(pid_, nullptr, WNOHANG) != 0) start();
}

void Guard::start() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw_limit("making a pipe");
  const FileDescriptor read_end(ends[0]);
  pipe_ = FileDescriptor(ends[1]);
  pid_ = ::fork();
  if (pid_ < 0) throw_limit("starting a process");
  if (pid_ == 0) keep_guard(read_end.get(), static_cast<int>(patience_.count()), mark_);
}

void Guard::forget(pid_t group) const {
  const pid_t gone = -group;
  // This cannot fail while the guard lives; if the guard was killed, there is nothing to forget.
  [[maybe_unused]] const ssize_t written = ::write(pipe_.get(), &gone, sizeof gone);
}

void Guard::beat() const {
  const pid_t none = 0;
  [[maybe_unused]] const ssize_t written = ::write(pipe_.get(), &none, sizeof none);
}

void Guard::kill_strays(std::chrono::milliseconds timeout) const { kill_marked(mark_, timeout); }

Guard::~Guard() {
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

}  // namespace lockstep
