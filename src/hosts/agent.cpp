#include "hosts/agent.h"

#include <signal.h>

#include <algorithm>
#include <iostream>

#include "base/machine_name.h"
#include "base/socket.h"
#include "base/version.h"
#include "hosts/connect.h"
#include "hosts/keep_states.h"
#include "hosts/link_process.h"
#include "hosts/reported_team.h"
#include "hosts/workplace.h"
#include "launch/launch_error.h"
#include "launch/state_keeper.h"

// One thread and one poll loop, as in the launcher. The coordinator's orders are carried out at once. Events of the
// ranks are reported at once (output, ends) or every kTellEvery (changed pages). The agent makes one decision of its
// own: without the channel its ranks end.

namespace lockstep::hosts {
namespace {

/// How long this process may be stopped before its ranks are killed; by then the coordinator has given it up.
constexpr std::chrono::milliseconds kGuardPatience(6000);

class Agent {
 public:
  Agent(const AgentOptions& options, const Key& key, const EnvironmentBlock& environment)
      : options_(options), environment_(environment), tls_(key, Side::kAgent) {}
  int run();

 private:
  struct Place : Workplace {
    using Workplace::Workplace;
    std::optional<LinkProcess> links;  ///< if the run encrypts
  };

  void greet();
  void turn();
  void take_signals();
  void take(const Channel::Message& message);
  void prepare(const Prepare& plan);
  void start(const Start& order);
  void finish();
  void tell_kept();
  void tell_links();
  void fail(const LaunchError& error);
  void lose_coordinator();
  /// Forgets the remains of a start, if one has run.
  void forget_team();

  const AgentOptions options_;
  const EnvironmentBlock environment_;  // this process's own
  LauncherSettings settings_;
  Guard guard_{kGuardPatience};
  const Tls tls_;
  const Deadline connected_by_{options_.patience};
  std::unique_ptr<Channel> channel_;
  bool was_answered_ = false;
  PollSet polled_;
  MachineMemory memory_;
  StateKeeper keeper_{memory_.fd(), nullptr, ""};  // only records
  std::optional<Place> workplace_;                 // once the coordinator has described the run
  std::unique_ptr<ReportedTeam> team_;             // while ranks run
  std::optional<int> exit_code_;
};

void Agent::greet() {
  channel_ = connect_to_coordinator(options_, tls_, settings_, connected_by_);
  channel_->send(Kind::kHello, Hello{.version = library_version(),
                                     .node = options_.node,
                                     .nodes = options_.nodes,
                                     .slots = options_.slots,
                                     .host = host_name(),
                                     .command = options_.command,
                                     .encrypt = options_.encrypt});
}

int Agent::run() {
  greet();
  while (!exit_code_) turn();
  return *exit_code_;
}

void Agent::turn() {
  polled_.clear();
  polled_.add(settings_.signal_fd(), POLLIN, [this](const pollfd&) { take_signals(); });
  polled_.add(channel_->fd(), channel_->events(), [this](const pollfd&) { channel_->act(); });
  if (team_) team_->watch(polled_);
  if (workplace_ && workplace_->links)
    polled_.add(workplace_->links->fd(), POLLIN, [this](const pollfd&) { tell_links(); });
  const Clock::time_point heard_by = channel_->last_heard() + kSilence;
  Clock::time_point wake_at = std::min(channel_->next_beat(), heard_by);
  if (team_) wake_at = std::min(wake_at, team_->due());
  if (memory_.is_writing()) wake_at = std::min(wake_at, Clock::now() + kTellEvery);
  polled_.wait(Deadline(wake_at).remaining_ms());
  try {
    while (!exit_code_) {
      const auto message = channel_->next(kMaxFrameBytes);
      if (!message) break;
      was_answered_ = true;
      take(*message);
    }
    if (exit_code_) return;
    if (team_) team_->tell();
    tell_kept();
  } catch (const ProtocolError& error) {
    channel_->close(error.what());
  }
  const auto now = Clock::now();
  if (now - channel_->last_heard() >= kSilence) channel_->close("it has been silent for 4 s");
  if (now >= channel_->next_beat()) guard_.beat();
  channel_->beat(now);
  if (channel_->state() != Channel::State::kClosed) return;
  // Before its first message the coordinator may have had too many connections at once.
  if (was_answered_ || connected_by_.passed()) return lose_coordinator();
  greet();
}

void Agent::take_signals() {
  while (const int signal = settings_.next_signal())
    if (signal != SIGCONT && signal != SIGHUP) channel_->send(Kind::kSignal, Number{signal});
}

void Agent::take(const Channel::Message& message) {
  switch (message.kind) {
    case Kind::kPrepare:
      return prepare(decode<Prepare>(message.body));
    case Kind::kStart:
      return start(decode<Start>(message.body));
    case Kind::kOver: {
      const Over over = decode<Over>(message.body);
      if (!over.text.empty()) std::cerr << "lockstep: " << over.text << "\n";
      exit_code_ = over.exit_code;
      return;
    }
    case Kind::kKeep:
      return memory_.write(decode<Keep>(message.body));
    case Kind::kFinish:
      return finish();
    case Kind::kBeat:
      return;
    default:
      if (team_) team_->take(message);  // otherwise it was sent before the coordinator knew
  }
}

void Agent::tell_links() {
  for (const LinkNews& news : workplace_->links->take_news())
    if (team_) channel_->send(Kind::kLinkNews, News{news.text, news.is_failure});
}

void Agent::fail(const LaunchError& error) {
  channel_->send(Kind::kFailed, Failed{.exit_code = error.exit_code, .text = error.what()});
}

void Agent::forget_team() {
  if (!team_) return;
  // Ranks find a divergence together, so those of this machine report it on their pages.
  const auto ranks = team_->views();
  const bool diverged = std::any_of(
      ranks.begin(), ranks.end(), [](const RankView& rank) { return rank.account.failure == RankFailure::kDiverged; });
  keeper_.note(ranks, diverged ? kExitDiverged : 0);
  team_.reset();
}

void Agent::prepare(const Prepare& plan) {
  forget_team();  // it refers to the workplace
  try {
    workplace_.emplace(plan, environment_, options_.interface, channel_->addresses().here);
    Ready ready = workplace_->ready();
    if (plan.encrypt)
      ready.link_port = workplace_->links.emplace(tls_.key(), workplace_->address(), plan.link_port).port();
    channel_->send(Kind::kReady, ready);
  } catch (const LaunchError& error) {
    fail(error);
  }
}

void Agent::start(const Start& order) {
  forget_team();
  if (!workplace_) throw ProtocolError("a start without a plan");
  if (order.world_size > kMaxRanks || order.first_rank < 0 || order.slots < 1 ||
      order.first_rank > order.world_size - order.slots)
    throw ProtocolError("ranks that a run cannot have");
  try {
    guard_.renew();
    const bool has_links = workplace_->links && !order.links.machines.empty();
    if (has_links) workplace_->links->begin(order.links);
    team_ = std::make_unique<ReportedTeam>(*channel_, workplace_->setup(order, settings_, guard_, memory_.fd()), order,
                                           order.address.empty() ? workplace_->address() : order.address,
                                           has_links ? &*workplace_->links : nullptr);
  } catch (const LaunchError& error) {
    fail(error);
  }
}

void Agent::finish() {
  if (!team_) return;
  team_->finish();
  forget_team();
  channel_->send(Kind::kFinished);
}

void Agent::tell_kept() {
  const auto kept = memory_.written(std::chrono::milliseconds(0));
  if (!kept) return;
  channel_->send(Kind::kKept, Kept{.step = kept->step,
                                   .path_step = kept->path_step,
                                   .path = kept->path,
                                   .problem = kept->problem,
                                   .written = kept->written});
}

void Agent::lose_coordinator() {
  std::cerr << "lockstep: " << host_name() << " has lost the coordinator: " << channel_->reason()
            << (team_ ? "; its ranks are ended" : "") << "\n";
  if (team_) team_->end();
  forget_team();
  exit_code_ = kExitMachineLost;
  if (!workplace_) return;
  // The memory ends with this process.
  if (!memory_.is_writing())
    memory_.write({.other_folder = kept_folder_in(workplace_->folder()), .is_sound = !keeper_.left().suspect});
  std::optional<KeptState> state;
  while (!(state = memory_.written(kTellEvery))) guard_.beat();
  const std::string kept = describe(*state);
  if (!kept.empty()) std::cerr << "lockstep: " << host_name() << " kept: " << kept << "\n";
}

}  // namespace

int run_agent(const AgentOptions& options, const Key& key, const EnvironmentBlock& environment) {
  return Agent(options, key, environment).run();
}

}  // namespace lockstep::hosts
