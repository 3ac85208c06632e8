#include "hosts/agent_process.h"

#include <algorithm>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "launch/launch_error.h"

namespace lockstep::hosts {
namespace {

constexpr const char* kPath = "/usr/local/bin:/usr/bin:/bin";

struct Pipe {
  FileDescriptor read, write;
};

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw LaunchError(kExitResourceLimit, std::string("making a pipe: ") + std::strerror(errno));
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

}  // namespace

AgentProcess::AgentProcess(const std::vector<std::string>& words, const Key& key, const EnvironmentBlock& environment,
                           const Guard& guard, const LauncherSettings& settings)
    : guard_(guard) {
  Pipe input = make_pipe(), output = make_pipe();
  ::fcntl(output.read.get(), F_SETFL, O_NONBLOCK);
  const std::string text = key.text() + "\n";
  if (::write(input.write.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    throw LaunchError(kExitResourceLimit, std::string("writing to a pipe: ") + std::strerror(errno));
  process_.emplace(ProcessStart{.program = find_program(words[0], find_variable(environment, "PATH", kPath)),
                                .arguments = words,
                                .environment = environment,
                                .input = input.read.get(),
                                .output = output.write.get(),
                                .error = output.write.get(),
                                .announce = guard.registry()},
                   settings);
  output_ = std::move(output.read);
}

AgentProcess::~AgentProcess() { guard_.forget(process_->pid()); }

void AgentProcess::watch(PollSet& polled) {
  if (output_) polled.add(output_.get(), POLLIN, [this](const pollfd&) { read_output(); });
  if (!end_) polled.add(process_->pidfd(), POLLIN, [this](const pollfd&) { end_ = process_->end(); });
}

std::string AgentProcess::read_output() {
  std::array<char, 4096> piece;
  std::string found;
  while (output_) {
    const ssize_t count = ::read(output_.get(), piece.data(), piece.size());
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) break;
    if (count <= 0) {
      lines_.finish(found);
      output_.reset();
      break;
    }
    lines_.feed({piece.data(), static_cast<size_t>(count)}, found);
  }
  tail_.add(found);
  return found;
}

std::string AgentProcess::last_line() const {
  const auto& lines = tail_.lines();
  // An error's own text stands before the line that says how it is explained.
  const auto is_text = [](const std::string& line) { return !line.starts_with("  explain "); };
  const auto found = std::find_if(lines.rbegin(), lines.rend(), is_text);
  return found == lines.rend() ? "" : *found;
}

}  // namespace lockstep::hosts
