#include "hosts/link_process.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "hosts/addresses.h"
#include "hosts/wire.h"
#include "launch/launch_error.h"

namespace lockstep::hosts {
namespace {

/// For an order to a process of this machine, which may be busy. Less than the silence after which an agent is lost.
constexpr std::chrono::seconds kOrderTime(3);
constexpr size_t kMostMessage = 256 << 10;

[[noreturn]] void carry_links(FileDescriptor control, Listener listener, const Key& key) {
  ::setsid();
  ::prctl(PR_SET_NAME, "lockstep-links");
  ::signal(SIGPIPE, SIG_IGN);  // OpenSSL writes to sockets that may have been shut down
  // The agent's descriptors are not kept: its channel must end with it.
  ::dup2(control.release(), 0);
  ::dup2(listener.socket.release(), 1);
  ::close_range(2, ~0U, 0);
  run_link_carrier(FileDescriptor(0), FileDescriptor(1), key);
  ::_exit(0);
}

}  // namespace

LinkProcess::LinkProcess(const Key& key, const std::string& address, int port) {
  Listener listener = listen_on(address, port);
  port_ = listener.endpoint.port;
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    throw LaunchError(kExitResourceLimit, std::string("making a socket: ") + std::strerror(errno));
  control_ = FileDescriptor(ends[0]);
  FileDescriptor theirs(ends[1]);
  pid_ = ::fork();
  if (pid_ < 0) throw LaunchError(kExitResourceLimit, std::string("starting a process: ") + std::strerror(errno));
  if (pid_ == 0) {
    control_.reset();
    carry_links(std::move(theirs), std::move(listener), key);
  }
}

LinkProcess::~LinkProcess() {
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

bool LinkProcess::receive(std::string& text, bool waits) {
  if (gone_) return false;
  if (waits) {
    pollfd polled{.fd = control_.get(), .events = POLLIN, .revents = 0};
    const Deadline deadline(kOrderTime);
    while (::poll(&polled, 1, deadline.remaining_ms()) < 0 && errno == EINTR) continue;
    if (polled.revents == 0) return false;
  }
  text.resize(kMostMessage);
  const ssize_t count = ::recv(control_.get(), text.data(), text.size(), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
  if (count <= 0) {
    gone_ = true;
    // Ranks here may wait for data that nobody brings any more.
    news_.push_back({"carry its encrypted links: their process has ended", true});
    return false;
  }
  text.resize(static_cast<size_t>(count));
  return true;
}

std::string LinkProcess::order(const std::string& text) {
  if (::send(control_.get(), text.data(), text.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(text.size()))
    return "the process that carries the encrypted links does not answer";
  ++unanswered_;
  std::string answer;
  while (receive(answer, /*waits=*/true)) {
    if (!keep(answer) && --unanswered_ == 0) return answer.substr(1);
  }
  return "the process that carries the encrypted links does not answer";
}

void LinkProcess::begin(const LinkPlan& plan) {
  if (const std::string problem = order(kLinkBegin + encode(plan)); !problem.empty())
    throw LaunchError(kExitNotStarted, problem);
}

void LinkProcess::open(const LinkEnd& end) {
  if (const std::string problem = order(kLinkOpen + std::to_string(end.machine) + " " + std::to_string(end.port));
      !problem.empty())
    throw LaunchError(kExitNotStarted, problem);
}

bool LinkProcess::keep(const std::string& text) {
  if (text[0] != kLinkNews && text[0] != kLinkFailure) return false;
  news_.push_back({text.substr(1), text[0] == kLinkFailure});
  return true;
}

std::vector<LinkNews> LinkProcess::take_news() {
  std::string text;
  while (receive(text, /*waits=*/false))
    if (!keep(text)) --unanswered_;
  return std::exchange(news_, {});
}

}  // namespace lockstep::hosts
