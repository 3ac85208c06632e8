#include "hosts/connect.h"

#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <iostream>

#include "launch/launch_error.h"

namespace lockstep::hosts {
namespace {

constexpr std::chrono::milliseconds kTryTime(2000);
constexpr std::chrono::milliseconds kFirstPause(20), kLongestPause(500);
constexpr std::chrono::seconds kNoteEvery(5);

void stop_if_told(const LauncherSettings& settings, std::chrono::milliseconds time) {
  pollfd polled{.fd = settings.signal_fd(), .events = POLLIN, .revents = 0};
  if (::poll(&polled, 1, static_cast<int>(time.count())) <= 0) return;
  while (const int signal = settings.next_signal())
    if (signal != SIGCONT && signal != SIGHUP)
      throw LaunchError(static_cast<ExitCode>(128 + signal), "stopped before the coordinator answered");
}

/// Null if the handshake failed, with the reason in `why`.
std::unique_ptr<Channel> shake_hands(FileDescriptor socket, const Tls& tls, const Endpoint& endpoint,
                                     std::string& why) {
  auto channel = std::make_unique<Channel>(std::move(socket), tls);
  const Deadline deadline(kTryTime);
  channel->act();
  while (channel->state() == Channel::State::kHandshake && !deadline.passed()) {
    pollfd polled{.fd = channel->fd(), .events = channel->events(), .revents = 0};
    ::poll(&polled, 1, deadline.remaining_ms());
    channel->act();
  }
  if (channel->key_was_refused())
    throw LaunchError(kExitRefusedPeer,
                      "the coordinator at " + endpoint.text() +
                          " does not have this machine's key: use the same key file on all machines, " +
                          "and make sure that no other run uses this rendezvous (" + channel->reason() + ")");
  if (channel->is_open()) return channel;
  why = channel->reason().empty() ? "it does not answer" : channel->reason();
  return nullptr;
}

const char* advice(const AgentOptions& options) {
  if (!options.join_name.empty())
    return "; the run may have ended, or have another address, which its launcher tells at the start";
  if (options.by_hand) return "; start `lockstep run` with --node-rank 0 there, and open its port in the firewall";
  return "; open its port in the firewall, or choose with --interface a network that all machines share";
}

}  // namespace

std::unique_ptr<Channel> connect_to_coordinator(const AgentOptions& options, const Tls& tls,
                                                const LauncherSettings& settings, const Deadline& deadline) {
  const int seconds = (deadline.remaining_ms() + 500) / 1000;
  auto pause = kFirstPause;
  auto tell_at = Clock::now() + kNoteEvery;
  std::string where, why;
  for (const Endpoint& endpoint : options.coordinators) where += (where.empty() ? "" : ", ") + endpoint.text();
  for (;;) {
    for (const Endpoint& endpoint : options.coordinators) {
      const auto left = std::min<Clock::duration>(kTryTime, std::chrono::milliseconds(deadline.remaining_ms()));
      FileDescriptor socket = connect_to(endpoint, Deadline(Clock::now() + left), why);
      if (!socket) continue;
      if (auto channel = shake_hands(std::move(socket), tls, endpoint, why)) return channel;
    }
    if (deadline.passed())
      throw LaunchError(kExitNotStarted, "the coordinator at " + where + " could not be reached within " +
                                             std::to_string(seconds) + " s: " + why + advice(options));
    if (options.by_hand && Clock::now() >= tell_at) {
      std::cerr << "lockstep: waits for the coordinator at " << where << " (" << why << ")\n";
      tell_at += kNoteEvery;
    }
    stop_if_told(settings, pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

}  // namespace lockstep::hosts
