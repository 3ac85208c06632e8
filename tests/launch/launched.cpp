#include "launch/launched.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>
#include <sstream>
#include <thread>

#include "base/clock.h"
#include "base/process_search.h"

namespace lockstep {

namespace fs = std::filesystem;

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

bool eventually(const std::function<bool()>& condition, std::chrono::milliseconds timeout) {
  for (const Deadline deadline(timeout); !condition();) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

Launched::Launched(const std::vector<std::string>& arguments, Options options)
    : mark_("LOCKSTEP_TEST_MARK=" + folder_.path().string()), pending_input_(options.input), start_(Clock::now()) {
  const std::string script = options.before + (options.before.empty() ? "" : "\n") + "exec \"$0\" run \"$@\"";
  std::vector<std::string> words = {"/bin/sh", "-c", script, LOCKSTEP_BIN_DIR "/lockstep"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<std::string> block = std::move(options.environment);
  block.push_back("PATH=/usr/local/bin:/usr/bin:/bin");
  block.push_back(mark_);
  std::vector<char*> argv, envp;
  for (auto& word : words) argv.push_back(word.data());
  for (auto& variable : block) envp.push_back(variable.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);

  std::array<int, 2> in, out, err;
  if (options.terminal) {
    const winsize size{.ws_row = 24, .ws_col = 123, .ws_xpixel = 0, .ws_ypixel = 0};
    if (::openpty(&out[0], &out[1], nullptr, nullptr, &size) != 0) throw std::runtime_error("openpty failed");
    for (const int fd : out) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  } else if (::pipe2(in.data(), O_CLOEXEC) != 0 || ::pipe2(out.data(), O_CLOEXEC) != 0 ||
             ::pipe2(err.data(), O_CLOEXEC) != 0) {
    throw std::runtime_error("pipe2 failed");
  }
  pid_ = ::fork();
  if (pid_ == 0) {
    ::setsid();
    if (options.terminal) ::ioctl(out[1], TIOCSCTTY, 0);
    ::dup2(options.terminal ? out[1] : in[0], 0);
    ::dup2(out[1], 1);
    ::dup2(options.terminal ? out[1] : err[1], 2);
    ::close_range(3, ~0U, 0);
    if (::chdir(folder_.path().c_str()) == 0) ::execve(argv[0], argv.data(), envp.data());
    ::_exit(126);
  }
  out_ = FileDescriptor(out[0]);
  ::close(out[1]);
  ::fcntl(out[0], F_SETFL, O_NONBLOCK);
  if (options.terminal) return;
  in_ = FileDescriptor(in[1]);
  err_ = FileDescriptor(err[0]);
  ::close(in[0]);
  ::close(err[1]);
  ::fcntl(in[1], F_SETFL, O_NONBLOCK);
  ::fcntl(err[0], F_SETFL, O_NONBLOCK);
}

Launched::~Launched() {
  if (pid_ > 0) wait(std::chrono::milliseconds(0));
  for (const pid_t left : processes()) ::kill(left, SIGKILL);
}

void Launched::read_some(int timeout_ms) {
  if (in_ && pending_input_.empty()) in_.reset();
  std::array<pollfd, 3> polled = {pollfd{out_.get(), POLLIN, 0}, pollfd{err_.get(), POLLIN, 0},
                                  pollfd{in_.get(), POLLOUT, 0}};
  ::poll(polled.data(), polled.size(), timeout_ms);
  std::array<char, 64 << 10> piece;
  const auto read_from = [&](FileDescriptor& fd, std::string& text) {
    const ssize_t count = ::read(fd.get(), piece.data(), piece.size());
    if (count > 0) text.append(piece.data(), static_cast<size_t>(count));
    if (count == 0 || (count < 0 && errno != EAGAIN)) fd.reset();  // EIO: a terminal that nobody holds any more
  };
  if (polled[0].revents != 0) read_from(out_, result_.out);
  if (polled[1].revents != 0) read_from(err_, result_.err);
  if (polled[2].revents != 0) {
    const ssize_t count = ::write(in_.get(), pending_input_.data(), pending_input_.size());
    if (count >= 0)
      pending_input_.erase(0, static_cast<size_t>(count));
    else if (errno != EAGAIN)
      in_.reset();
  }
}

Launched::Result Launched::wait(std::chrono::milliseconds timeout) {
  const Deadline deadline(timeout);
  int status = 0;
  while (::waitpid(pid_, &status, WNOHANG) == 0) {
    if (deadline.passed()) {
      if (timeout.count() > 0) ADD_FAILURE() << "the launcher has not ended in time";
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, &status, 0);
      break;
    }
    read_some(5);
  }
  result_.seconds = seconds_since(start_);
  for (int turn = 0; turn < 1000 && (out_ || err_); ++turn) read_some(5);
  pid_ = -1;
  result_.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return result_;
}

bool Launched::wait_for(const std::string& text) {
  return eventually([&] {
    read_some(0);
    return result_.out.find(text) != std::string::npos || result_.err.find(text) != std::string::npos;
  });
}

void Launched::type(const std::string& text) {
  [[maybe_unused]] const ssize_t written = ::write(out_.get(), text.data(), text.size());
}

std::string Launched::stamped_log(int rank) const {
  return read_file(folder_.path() / "run" / ("rank_" + std::to_string(rank) + ".log"));
}

std::string Launched::log(int rank) const {
  constexpr std::string_view kShape = "0000-00-00T00:00:00.000Z ";
  const std::string stamped = stamped_log(rank);
  std::string text;
  for (size_t start = 0; start < stamped.size();) {
    const size_t end = std::min(stamped.find('\n', start), stamped.size() - 1) + 1;
    std::string shape = stamped.substr(start, kShape.size());
    std::replace_if(
        shape.begin(), shape.end(), [](unsigned char c) { return std::isdigit(c) != 0; }, '0');
    if (shape != kShape) return "a line without its time: " + stamped.substr(start, end - start);
    text.append(stamped, start + kShape.size(), end - start - kShape.size());
    start = end;
  }
  return text;
}

std::vector<pid_t> Launched::processes() const { return processes_with(mark_); }

}  // namespace lockstep
