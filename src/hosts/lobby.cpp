#include "hosts/lobby.h"

#include <poll.h>

namespace lockstep::hosts {
namespace {

constexpr size_t kMostSilent = 4096;  // they have the key, so this only bounds a mistake

}  // namespace

void Lobby::watch(PollSet& polled) {
  door_.watch(polled);
  for (const auto& channel : silent_)
    polled.add(channel->fd(), channel->events(), [one = channel.get()](const pollfd&) { one->act(); });
}

void Lobby::tick() {
  const auto now = Clock::now();
  door_.tick(now);
  for (auto& channel : door_.take_admitted())
    if (silent_.size() < kMostSilent) silent_.push_back(std::move(channel));
  for (auto& channel : silent_) {
    if (const auto message = channel->next(kMaxHelloBytes)) {
      try {
        if (message->kind != Kind::kHello) throw ProtocolError("the first message is not a greeting");
        arrivals_.push_back({decode<Hello>(message->body), std::move(channel)});
        continue;
      } catch (const ProtocolError& error) {
        // The greeting may differ before the protocol numbers do.
        send_away(*channel, 46, std::string("the coordinator runs another version of Lockstep (") + error.what() + ")");
      }
    }
    if (channel->state() == Channel::State::kClosed || now - channel->last_heard() > kSilence) channel.reset();
  }
  std::erase(silent_, nullptr);
}

std::string Lobby::take_news() {
  if (door_.turned_away() < told_from_) return "";
  while (told_from_ <= door_.turned_away()) told_from_ *= 10;
  return std::to_string(door_.turned_away()) + (door_.turned_away() == 1 ? " connection" : " connections") +
         " without this run's key turned away, the last from " + door_.last_stranger();
}

void Lobby::send_away(Channel& channel, int exit_code, const std::string& why) {
  channel.send(Kind::kOver, Over{.exit_code = exit_code, .text = why});
  channel.close("sent away");
}

}  // namespace lockstep::hosts
