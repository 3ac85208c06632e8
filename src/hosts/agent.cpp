#include "hosts/agent.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <future>
#include <iostream>
#include <map>

#include "base/processor.h"
#include "base/socket.h"
#include "base/state_memory.h"
#include "base/version.h"
#include "checkpoint/memory/kept_state.h"
#include "hosts/connect.h"
#include "hosts/keep_states.h"
#include "hosts/machine_environment.h"
#include "hosts/program_facts.h"
#include "hosts/store_relay.h"
#include "launch/diagnosis/failure_report.h"
#include "launch/held_port.h"
#include "launch/launch_error.h"
#include "launch/process/local_team.h"
#include "launch/run_folder.h"
#include "launch/state_keeper.h"

// One thread, one poll loop, as in the launcher. What the coordinator says is carried out at once; what the ranks do is
// told at once (output, ends) or every kTellEvery (their pages, where they have changed). The agent decides nothing but
// this: without the channel its ranks end.

namespace lockstep::hosts {
namespace {

constexpr std::chrono::milliseconds kTellEvery(100);
constexpr std::chrono::milliseconds kSeenEvery(500);
/// How long this process may be stopped before its ranks are killed: the coordinator has given it up by then.
constexpr std::chrono::milliseconds kGuardPatience(6000);
/// Output on its way that the coordinator has not taken yet.
constexpr size_t kMostUntaken = 1 << 20;
constexpr size_t kMostToSend = 4 << 20;

class Agent {
 public:
  Agent(const AgentOptions& options, const Key& key, const EnvironmentBlock& environment)
      : agent_options_(options), own_environment_(environment), tls_(key, Side::kAgent) {}
  int run();

 private:
  void greet();
  void turn();
  void take_signals();
  void take(const Channel::Message& message);
  void prepare(const Prepare& plan);
  void start(const Start& order);
  void finish();
  void keep(const Keep& order);
  void tell_kept();
  void fail(const LaunchError& error);
  void tell();
  void tell_pages();
  void tell_seen(const Look& look);
  void tell_ends();
  void lose_coordinator();

  const AgentOptions agent_options_;
  const EnvironmentBlock own_environment_;
  LauncherSettings settings_;
  Guard guard_{kGuardPatience};
  const Tls tls_;
  const Deadline connected_by_{agent_options_.patience};
  std::unique_ptr<Channel> channel_;
  bool was_answered_ = false;
  PollSet polled_;

  // From Prepare on.
  LaunchOptions options_;
  EnvironmentBlock environment_;
  std::vector<RankCommand> commands_;
  std::optional<RunFolder> folder_;
  std::optional<HeldPort> port_;
  const FileDescriptor state_memory_ = StateMemory::make();  // this machine's copy, for the ranks of a restart
  std::string address_, run_id_;
  Display display_{{}};
  TerminalInput input_;

  // Of the ranks that run.
  std::unique_ptr<LocalTeam> team_;
  std::optional<StoreRelay> relay_;
  std::map<int, std::string> pages_;  // as they were told last, by rank
  bool stop_told_ = false;
  Clock::time_point tell_at_{}, seen_at_{};
  size_t untaken_ = 0;

  std::future<KeptState> kept_;  // being written, when the run has given up

  std::optional<int> exit_code_;
};

void Agent::greet() {
  channel_ = connect_to_coordinator(agent_options_, tls_, settings_, connected_by_);
  channel_->send(Kind::kHello, Hello{.version = library_version(),
                                     .node = agent_options_.node,
                                     .nodes = agent_options_.nodes,
                                     .slots = agent_options_.slots,
                                     .host = host_name(),
                                     .command = agent_options_.command});
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
  if (team_) {
    team_->watch(polled_);
    relay_->watch(polled_, [this](int) { return channel_->queued() < kMostToSend; });
  }
  const Clock::time_point heard_by = channel_->last_heard() + kSilence;
  Clock::time_point wake_at = std::min(channel_->next_beat(), heard_by);
  if (team_) wake_at = std::min(wake_at, tell_at_);
  if (kept_.valid()) wake_at = std::min(wake_at, Clock::now() + kTellEvery);
  polled_.wait(Deadline(wake_at).remaining_ms());
  try {
    while (!exit_code_) {
      const auto message = channel_->next(kMaxFrameBytes);
      if (!message) break;
      was_answered_ = true;
      take(*message);
    }
    if (exit_code_) return;
    if (team_) tell();
    tell_kept();
  } catch (const ProtocolError& error) {
    channel_->close(error.what());
  }
  const auto now = Clock::now();
  if (now - channel_->last_heard() >= kSilence) channel_->close("it has not been heard of for 4 s");
  if (now >= channel_->next_beat()) guard_.beat();
  channel_->beat(now);
  if (channel_->state() != Channel::State::kClosed) return;
  // Before it said anything it may have had too many connections at once.
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
    case Kind::kTaken:
      untaken_ -= std::min(untaken_, static_cast<size_t>(std::max<int64_t>(0, decode<Number>(message.body).value)));
      return;
    case Kind::kKeep:
      return keep(decode<Keep>(message.body));
    case Kind::kBeat:
      return;
    default:
      break;
  }
  if (!team_) return;  // it was sent before the coordinator knew
  switch (message.kind) {
    case Kind::kStop:
      return team_->stop(static_cast<int>(decode<Number>(message.body).value));
    case Kind::kKill:
      return team_->kill();
    case Kind::kAsk:
      return team_->ask_to_leave();
    case Kind::kLook:
      return tell_seen(decode<Look>(message.body));
    case Kind::kFinish:
      return finish();
    case Kind::kStore: {
      const Store store = decode<Store>(message.body);
      return relay_->deliver(store.rank, store.bytes);
    }
    default:
      throw ProtocolError("an unknown message, of kind " + std::to_string(static_cast<int>(message.kind)));
  }
}

void Agent::fail(const LaunchError& error) {
  channel_->send(Kind::kFailed, Failed{.exit_code = error.exit_code, .text = error.what()});
}

void Agent::prepare(const Prepare& plan) {
  try {
    std::error_code error;
    if (!plan.folder.empty()) std::filesystem::current_path(plan.folder, error);
    if (error)
      throw LaunchError(kExitNotStarted, "there is no folder " + plan.folder + " to run in (" + error.message() +
                                             "); it must be at the same path on all machines");
    environment_ = plan.environment.empty() ? own_environment_ : environment_here(plan.environment, own_environment_);
    options_.ranks = plan.slots;
    options_.bind = static_cast<Binding>(std::clamp(plan.bind, 0, static_cast<int>(Binding::kNuma)));
    options_.command = plan.command;
    options_.max_restarts = plan.max_restarts;
    options_.shown_ranks.clear();
    run_id_ = plan.run_id;
    commands_ = plan_ranks(options_, environment_);
    folder_.emplace(plan.run_dir, plan.keep_run_dir, RunFolder::Use::kShared);
    if (!agent_options_.interface.empty())
      address_ = address_on(agent_options_.interface);
    else
      address_ = plan.address.empty() ? channel_->local_address() : plan.address;
    port_.emplace(address_);
    channel_->send(Kind::kReady, Ready{.address = address_,
                                       .master_port = port_->number(),
                                       .program_hash = program_hash(commands_[0].program, plan.command),
                                       .processor = processor_name(),
                                       .warnings = plan_warnings(options_, environment_)});
  } catch (const LaunchError& error) {
    fail(error);
  }
}

void Agent::start(const Start& order) {
  team_.reset();
  relay_.emplace([this](int rank, std::string_view bytes) {
    channel_->send(Kind::kStore, Store{.rank = rank, .bytes = std::string(bytes)});
  });
  pages_.clear();
  stop_told_ = false;
  untaken_ = 0;
  tell_at_ = seen_at_ = Clock::now();
  MachineShare share{.first_rank = order.first_rank,
                     .count = order.slots,
                     .world_size = order.world_size,
                     .node = order.node,
                     .nodes = order.nodes,
                     .address = address_,
                     .master_address = order.master_address,
                     .terminal_rank = order.terminal_rank,
                     .terminal_columns = order.terminal_columns};
  share.connect_to_store = [this](int rank) {
    auto [ours, theirs] = make_socket_pair();
    relay_->add(rank, std::move(ours));
    return std::move(theirs);
  };
  share.take_output = [this](int rank, size_t stream, std::string_view bytes) {
    untaken_ += bytes.size();
    channel_->send(Kind::kOutput,
                   Output{.rank = rank, .stream = static_cast<int>(stream), .bytes = std::string(bytes)});
  };
  share.takes_output = [this] { return untaken_ < kMostUntaken; };
  try {
    if (order.world_size > kMaxRanks || order.first_rank < 0 || order.slots < 1 ||
        order.first_rank > order.world_size - order.slots)
      throw ProtocolError("ranks that a run cannot have");
    if (std::exchange(options_.ranks, order.slots) != order.slots) commands_ = plan_ranks(options_, environment_);
    team_ = std::make_unique<LocalTeam>(TeamSetup{.options = options_,
                                                  .environment = environment_,
                                                  .commands = commands_,
                                                  .folder = folder_->path(),
                                                  .settings = settings_,
                                                  .guard = guard_,
                                                  .display = display_,
                                                  .input = input_,
                                                  .memory_fd = state_memory_.get(),
                                                  .master_port = order.master_port,
                                                  .run_id = run_id_},
                                        order.restarts, std::move(share));
  } catch (const LaunchError& error) {
    return fail(error);
  }
  Started started;
  for (const Rank& rank : team_->ranks()) started.pids.push_back(rank.pid);
  channel_->send(Kind::kStarted, started);
}

void Agent::finish() {
  team_->finish();
  tell_ends();
  tell_pages();
  team_->await_end();
  team_.reset();
  relay_.reset();
  channel_->send(Kind::kFinished);
}

/// On a thread of its own: it may take longer than the coordinator waits for a beat. No ranks run meanwhile.
void Agent::keep(const Keep& order) {
  kept_ = std::async(std::launch::async,
                     [this, order] { return keep_state(state_memory_.get(), order.other_folder, order.is_sound); });
}

void Agent::tell_kept() {
  if (!kept_.valid() || kept_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return;
  const KeptState kept = kept_.get();
  channel_->send(Kind::kKept, Kept{.step = kept.step,
                                   .path_step = kept.path_step,
                                   .path = kept.path,
                                   .problem = kept.problem,
                                   .written = kept.written});
}

void Agent::tell() {
  tell_ends();
  const auto now = Clock::now();
  if (now < tell_at_) return;
  tell_at_ = now + kTellEvery;
  tell_pages();
  const bool stop_asked = team_->board() != nullptr && team_->board()->head().stop_asked.load() != 0;
  if (now < seen_at_ && stop_asked == stop_told_) return;
  seen_at_ = now + kSeenEvery;
  stop_told_ = stop_asked;
  tell_seen({});
}

void Agent::tell_pages() {
  if (team_->board() == nullptr) return;
  Pages changed{.now_ns = Clock::now().time_since_epoch().count()};
  for (const Rank& rank : team_->ranks()) {
    std::string bytes(reinterpret_cast<const char*>(&team_->board()->page(rank.number)), RankPage::kBytes);
    std::string& told = pages_[rank.number];
    if (bytes == told) continue;
    told = bytes;
    changed.pages.push_back({rank.number, std::move(bytes)});
  }
  if (!changed.pages.empty()) channel_->send(Kind::kPages, changed);
}

void Agent::tell_seen(const Look& look) {
  const RanksObserved seen = team_->observe(look.process_states, look.processor_times);
  Seen message{.look = look, .stop_asked = seen.stop_asked, .stop_at = static_cast<int64_t>(seen.stop_at)};
  for (const RankView& view : seen.ranks)
    message.ranks.push_back(
        {.outlived = view.outlived,
         .process_state = view.process_state,
         .processor_ns = view.processor_time
                             ? std::chrono::duration_cast<std::chrono::nanoseconds>(*view.processor_time).count()
                             : -1});
  channel_->send(Kind::kSeen, message);
}

void Agent::tell_ends() {
  for (const std::string& message : team_->take_messages()) std::cerr << "lockstep: " << message << "\n";
  const auto ends = team_->take_ends();
  if (ends.empty()) return;
  tell_pages();  // what a rank wrote last explains its end
  for (const RankEnd& end : ends)
    channel_->send(Kind::kEnded,
                   Ended{.rank = end.rank,
                         .how = static_cast<int>(end.how.kind),
                         .value = end.how.value,
                         .seconds = end.seconds,
                         .peak_bytes = static_cast<int64_t>(end.peak_bytes),
                         .error_text = team_->error_text(end.rank),
                         .memory_kills = static_cast<int64_t>(end.memory.count),
                         .counted_in = end.memory.counted_in,
                         .memory_limit = end.memory.limit_bytes ? static_cast<int64_t>(*end.memory.limit_bytes) : -1});
}

void Agent::lose_coordinator() {
  std::cerr << "lockstep: " << host_name() << " has lost the coordinator: " << channel_->reason()
            << (team_ ? "; its ranks are ended" : "") << "\n";
  if (team_) {
    team_->kill();
    team_->finish();
    team_->await_end();
  }
  team_.reset();
  exit_code_ = kExitMachineLost;
  if (!folder_) return;
  // The memory ends with this process.
  if (!kept_.valid()) keep({.other_folder = kept_folder_in(folder_->path()), .is_sound = true});
  while (kept_.wait_for(kTellEvery) != std::future_status::ready) guard_.beat();
  const std::string kept = describe(kept_.get());
  if (!kept.empty()) std::cerr << "lockstep: " << host_name() << " kept: " << kept << "\n";
}

}  // namespace

int run_agent(const AgentOptions& options, const Key& key, const EnvironmentBlock& environment) {
  return Agent(options, key, environment).run();
}

}  // namespace lockstep::hosts
