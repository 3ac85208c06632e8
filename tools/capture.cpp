#include "capture.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "base/file_descriptor.h"

namespace lockstep {
namespace {

constexpr size_t kKeptBytes = 1 << 20;

/// Starts it as the leader of a group of its own. Returns 0 where that fails, with `failure` set.
pid_t start(const std::vector<std::string>& command, int out, int err, std::string& failure) {
  std::vector<char*> arguments;
  for (const auto& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, out, 1);
  ::posix_spawn_file_actions_adddup2(&actions, err, 2);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  pid_t pid = 0;
  const int error = ::posix_spawnp(&pid, arguments[0], &actions, &attributes, arguments.data(), ::environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (error == 0) return pid;
  failure = std::strerror(error);
  return 0;
}

void read_into(FileDescriptor& pipe, std::string& text) {
  std::array<char, 64 << 10> piece;
  const ssize_t count = ::read(pipe.get(), piece.data(), piece.size());
  if (count <= 0) return pipe.reset();
  text.append(piece.data(), std::min(static_cast<size_t>(count), kKeptBytes - std::min(text.size(), kKeptBytes)));
}

}  // namespace

Captured capture(const std::vector<std::string>& command, std::chrono::milliseconds timeout) {
  Captured result;
  std::array<int, 2> out{}, err{};
  if (::pipe2(out.data(), O_CLOEXEC) != 0) return {.failure = std::strerror(errno)};
  FileDescriptor out_read(out[0]), out_write(out[1]);
  if (::pipe2(err.data(), O_CLOEXEC) != 0) return {.failure = std::strerror(errno)};
  FileDescriptor err_read(err[0]), err_write(err[1]);
  const pid_t pid = start(command, out[1], err[1], result.failure);
  if (pid == 0) return result;
  out_write.reset();
  err_write.reset();

  const Deadline deadline(timeout);
  while ((out_read || err_read) && !deadline.passed()) {
    std::array<pollfd, 2> polled = {pollfd{out_read.get(), POLLIN, 0}, pollfd{err_read.get(), POLLIN, 0}};
    ::poll(polled.data(), polled.size(), deadline.remaining_ms());
    if (polled[0].revents != 0) read_into(out_read, result.out);
    if (polled[1].revents != 0) read_into(err_read, result.err);
  }
  int status = 0;
  bool killed = false;
  while (::waitpid(pid, &status, WNOHANG) == 0) {
    if (deadline.passed() && !killed) killed = ::kill(-pid, SIGKILL) == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (killed)
    result.failure = "it was not done after " + std::to_string(timeout.count() / 1000) + " s";
  else
    result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

}  // namespace lockstep
