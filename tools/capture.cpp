#include "capture.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "base/file_descriptor.h"

namespace lockstep {
namespace {

constexpr size_t kKeptBytes = 1 << 20;

constexpr int kObjectionEveryMs = 20;

/// The child between fork and exec: system calls only. Returns when something fails.
void become(char* const* arguments, int out, int err, pid_t parent) {
  if (::setpgid(0, 0) != 0 || ::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return;
  if (::getppid() != parent) ::_exit(1);  // it died before the previous line
  const int null = ::open("/dev/null", O_RDONLY);
  if (null < 0 || ::dup2(null, 0) < 0 || ::dup2(out, 1) < 0 || ::dup2(err, 2) < 0) return;
  ::signal(SIGPIPE, SIG_DFL);
  ::execvp(arguments[0], arguments);
}

/// Starts the command as the leader of its own group. Returns 0 on failure, with `failure` set.
pid_t start(const std::vector<std::string>& command, int out, int err, std::string& failure) {
  std::vector<char*> arguments;
  for (const auto& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  std::array<int, 2> report{};
  if (::pipe2(report.data(), O_CLOEXEC) != 0) {
    failure = std::strerror(errno);
    return 0;
  }
  const FileDescriptor report_read(report[0]);
  FileDescriptor report_write(report[1]);
  const pid_t parent = ::getpid(), pid = ::fork();
  int error = errno;
  if (pid == 0) {
    become(arguments.data(), out, err, parent);
    error = errno;
    [[maybe_unused]] const ssize_t written = ::write(report[1], &error, sizeof error);
    ::_exit(127);
  }
  report_write.reset();
  if (pid > 0 && ::read(report_read.get(), &error, sizeof error) != sizeof error) return pid;
  if (pid > 0) ::waitpid(pid, nullptr, 0);
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

Captured capture(const std::vector<std::string>& command, std::chrono::milliseconds timeout,
                 const std::function<std::string()>& objection) {
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
  std::string objected;
  while ((out_read || err_read) && !deadline.passed() && objected.empty()) {
    std::array<pollfd, 2> polled = {pollfd{out_read.get(), POLLIN, 0}, pollfd{err_read.get(), POLLIN, 0}};
    const int wait = deadline.remaining_ms();
    ::poll(polled.data(), polled.size(), objection ? std::min(wait, kObjectionEveryMs) : wait);
    if (objection) objected = objection();
    if (polled[0].revents != 0) read_into(out_read, result.out);
    if (polled[1].revents != 0) read_into(err_read, result.err);
  }
  int status = 0;
  bool killed = false;
  while (::waitpid(pid, &status, WNOHANG) == 0) {
    if ((deadline.passed() || !objected.empty()) && !killed) killed = ::kill(-pid, SIGKILL) == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (killed)
    result.failure =
        !objected.empty() ? objected : "it was not done after " + std::to_string(timeout.count() / 1000) + " s";
  else
    result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

}  // namespace lockstep
