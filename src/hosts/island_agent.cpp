#include "hosts/island_agent.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "base/hub_frame.h"
#include "base/machine_name.h"
#include "base/socket.h"
#include "base/version.h"
#include "hosts/channel.h"
#include "hosts/connect.h"
#include "hosts/workplace.h"
#include "launch/diagnosis/failure_report.h"
#include "launch/launch_error.h"
#include "launch/process/guard.h"
#include "launch/process/own_program.h"

namespace lockstep::hosts {
namespace {

/// Much less than RoundHub::kLeftOutAfter.
constexpr std::chrono::milliseconds kAliveEvery(150);
/// For the coordinator to be reached again; then its run is over.
constexpr std::chrono::seconds kReachAgain(10);
/// For ranks that have been told that the run is over, until they are asked to save and leave, and then until they are
/// killed.
constexpr std::chrono::seconds kTimeToHear(4), kTimeToSave(8);
/// For ranks to hear of another machine's error.
constexpr std::chrono::seconds kTimeToHearWhy(2);
/// For the coordinator to take the last message.
constexpr std::chrono::seconds kTimeToTell(2);
/// Bytes of this machine's under way to the hub, above which no more are taken from the rank.
constexpr size_t kMostFromRank = 32 << 20;

/// The connection of the machine's first rank.
class RankLine {
 public:
  explicit RankLine(FileDescriptor socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.get(); }
  bool is_open() const { return open_; }
  size_t queued() const { return out_.size() - written_; }
  void send(hub::Kind kind, std::string_view body) {
    out_ += hub::frame(kind, body);
    write();
  }
  void act(short events) {
    if ((events & POLLOUT) != 0) write();
    if ((events & ~POLLOUT) != 0) read();
  }
  /// Calls `pass` for each message that has come.
  template <typename Pass>
  void take(const Pass& pass) {
    size_t at = 0;
    while (in_.size() - at >= hub::kHeadBytes) {
      std::string_view rest = std::string_view(in_).substr(at);
      const auto size = hub::take<uint32_t>(rest);
      const auto kind = hub::take<hub::Kind>(rest);
      if (rest.size() < size) break;
      pass(kind, rest.substr(0, size));
      at += hub::kHeadBytes + size;
    }
    in_.erase(0, at);
  }

 private:
  void read() {
    std::array<char, 1 << 16> piece;
    for (int i = 0; i < 64; ++i) {
      const ssize_t count = ::recv(fd(), piece.data(), piece.size(), MSG_DONTWAIT);
      if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (count <= 0) {
        open_ = false;
        return;
      }
      in_.append(piece.data(), static_cast<size_t>(count));
    }
  }
  void write() {
    while (queued() > 0) {
      const ssize_t count = ::send(fd(), out_.data() + written_, queued(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (count < 0) {
        open_ = false;
        return;
      }
      written_ += static_cast<size_t>(count);
    }
    out_.clear();
    written_ = 0;
  }

  const FileDescriptor socket_;
  bool open_ = true;
  std::string in_, out_;
  size_t written_ = 0;
};

class IslandAgent {
 public:
  IslandAgent(const AgentOptions& options, const Key& key, const EnvironmentBlock& environment)
      : options_(options), environment_(environment), tls_(key, Side::kAgent) {}
  int run();

 private:
  void greet(const Deadline& deadline);
  /// Tells the coordinator, if this machine has joined: it has started no command whose end it would see.
  void tell_end(int exit_code);
  void turn();
  void poll_once();
  void take(const Channel::Message& message);
  void start(const Prepare& order);
  void take_signals();
  void accept_rank();
  void pass_on();
  void reach_again();
  /// Tells the ranks why the run is over, and ends those that have not ended by it after `patience`.
  void end_ranks(const std::string& why, std::chrono::seconds patience);

  const AgentOptions options_;
  const EnvironmentBlock environment_;  // this process's own
  LauncherSettings settings_;
  Guard guard_;
  const Tls tls_;
  const UnixListener listener_ = listen_unix();
  std::unique_ptr<Channel> channel_;
  std::optional<RankLine> rank_;
  std::optional<Process> program_;
  Clock::time_point alive_at_ = Clock::now();
  std::string run_dir_;
  int island_ = options_.node, turn_ = -1;
  std::optional<int> exit_code_;
};

void IslandAgent::greet(const Deadline& deadline) {
  channel_ = connect_to_coordinator(options_, tls_, settings_, deadline);
  const bool joins = !options_.join_name.empty();
  channel_->send(Kind::kHello, Hello{.version = library_version(),
                                     .node = island_,
                                     .host = joins ? options_.join_name : host_name(),
                                     .joins = joins,
                                     .turn = turn_});
}

int IslandAgent::run() {
  ::fcntl(listener_.socket.get(), F_SETFL, O_NONBLOCK);
  greet(Deadline(options_.patience));
  try {
    while (!exit_code_) turn();
  } catch (const LaunchError& error) {
    tell_end(error.exit_code);
    throw;
  }
  tell_end(*exit_code_);
  return *exit_code_;
}

void IslandAgent::tell_end(int exit_code) {
  if (options_.join_name.empty() || !channel_->is_open()) return;
  channel_->send(Kind::kEnded, Ended{.value = exit_code});
  for (const Deadline deadline(kTimeToTell); channel_->is_open() && channel_->queued() > 0 && !deadline.passed();) {
    PollSet polled;
    polled.add(channel_->fd(), channel_->events(), [this](const pollfd&) { channel_->act(); });
    polled.wait(deadline.remaining_ms());
  }
}

void IslandAgent::poll_once() {
  PollSet polled;
  polled.add(settings_.signal_fd(), POLLIN, [this](const pollfd&) { take_signals(); });
  polled.add(channel_->fd(), channel_->events(), [this](const pollfd&) { channel_->act(); });
  // An earlier rank's end must be told before the next one's words.
  if (!rank_) polled.add(listener_.socket.get(), POLLIN, [this](const pollfd&) { accept_rank(); });
  if (rank_) {
    const bool reads = channel_->queued() < kMostFromRank;
    const auto events = static_cast<short>((reads ? POLLIN : 0) | (rank_->queued() > 0 ? POLLOUT : 0));
    polled.add(rank_->fd(), events, [this](const pollfd& ready) { rank_->act(ready.revents); });
  }
  if (program_) polled.add(program_->pidfd(), POLLIN, [](const pollfd&) {});
  polled.wait(Deadline(alive_at_).remaining_ms());
}

void IslandAgent::turn() {
  poll_once();
  try {
    while (!exit_code_) {
      const auto message = channel_->next(hub::kMostBytes);
      if (!message) break;
      take(*message);
    }
  } catch (const ProtocolError& error) {
    channel_->close(error.what());
  }
  if (exit_code_) return;
  pass_on();
  const auto now = Clock::now();
  if (now >= alive_at_) {
    alive_at_ = now + kAliveEvery;
    channel_->send_bytes(static_cast<uint8_t>(hub::Kind::kAlive), {});
    // A result or state is on its way, which the rank gets when it is whole.
    if (rank_ && channel_->received() > 0) rank_->send(hub::Kind::kSteps, {});
  }
  if (now - channel_->last_heard() >= kSilence) channel_->close("it has been silent for 4 s");
  if (program_)
    if (const auto end = program_->end()) {
      exit_code_ = end->kind == ProcessEnd::Kind::kSignalled ? 128 + end->value
                   : end->kind == ProcessEnd::Kind::kExited  ? end->value
                                                             : int{kExitNotStarted};
      return;
    }
  if (channel_->state() == Channel::State::kClosed) reach_again();
}

void IslandAgent::pass_on() {
  if (!rank_) return;
  rank_->take(
      [this](hub::Kind kind, std::string_view body) { channel_->send_bytes(static_cast<uint8_t>(kind), body); });
  if (rank_->is_open()) return;
  rank_.reset();
  channel_->send_bytes(static_cast<uint8_t>(hub::Kind::kGone), {});
}

void IslandAgent::take(const Channel::Message& message) {
  const auto kind = static_cast<hub::Kind>(message.kind);
  if (kind >= hub::kFirst && kind <= hub::kLast) {
    if (rank_) rank_->send(kind, message.body);
    return;
  }
  switch (message.kind) {
    case Kind::kPrepare:
      return start(decode<Prepare>(message.body));
    case Kind::kAsk:
      if (program_) program_->signal_group(SIGTERM);
      return;
    case Kind::kOver: {
      const Over over = decode<Over>(message.body);
      if (!over.text.empty()) std::cerr << "lockstep: " << over.text << "\n";
      end_ranks(over.text.empty() ? "the run has ended" : over.text,
                over.text.empty() ? std::chrono::seconds(0) : kTimeToHearWhy);
      exit_code_ = over.exit_code;
      return;
    }
    default:
      return;  // kBeat
  }
}

void IslandAgent::start(const Prepare& order) {
  island_ = order.island;
  turn_ = order.turn;
  if (program_) return;  // it has connected again
  std::error_code error;
  std::filesystem::current_path(order.folder, error);
  if (error)
    throw LaunchError(kExitNotStarted, "there is no folder " + order.folder + " to run in (" + error.message() +
                                           "); it must exist at the same path on all machines");
  run_dir_ = order.run_dir;
  const FileDescriptor nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  std::vector<std::string> words = {"lockstep"};
  words.insert(words.end(), order.command.begin(), order.command.end());
  const std::string island = std::to_string(island_) + "/" + std::to_string(order.slots) + "@" + listener_.name;
  const EnvironmentBlock here =
      with_variables(environment_here(order.environment, environment_), {"LOCKSTEP_ISLAND=" + island, guard_.mark()});
  program_.emplace(ProcessStart{.program = own_program(),
                                .arguments = words,
                                .environment = here,
                                .input = nothing.get(),
                                .output = 1,
                                .error = 2,
                                .announce = guard_.registry()},
                   settings_);
}

void IslandAgent::take_signals() {
  while (const int signal = settings_.next_signal()) {
    if (signal == SIGCONT || signal == SIGHUP) continue;
    if (program_)
      program_->signal_group(signal);
    else
      exit_code_ = 128 + signal;
  }
}

void IslandAgent::accept_rank() {
  if (FileDescriptor socket = accept_same_user(listener_.socket.get())) rank_.emplace(std::move(socket));
}

void IslandAgent::reach_again() {
  const std::string why = channel_->reason();
  rank_.reset();  // it joins again
  try {
    greet(Deadline(kReachAgain));
  } catch (const LaunchError& error) {
    const std::string text = host_name() + " has lost the coordinator of the rounds: " + why + "; " + error.what();
    std::cerr << "lockstep: " << text << "; its ranks are ended" << std::endl;
    std::ofstream(run_dir_ + "/agent.log") << text << std::endl;  // who has started the agent may be gone
    end_ranks(text, kTimeToHear);
    exit_code_ = kExitMachineLost;
  }
}

void IslandAgent::end_ranks(const std::string& why, std::chrono::seconds patience) {
  // Those that come to a round get an error that says why. Others are asked to save, and killed in the end.
  const Deadline hear(patience), save(patience + kTimeToSave);
  bool told = false, asked = false;
  while (program_ && !program_->end() && !save.passed()) {
    if (hear.passed() && !std::exchange(asked, true)) program_->signal_group(SIGTERM);
    if (!rank_) {
      accept_rank();
      told = false;
    }
    if (rank_ && !std::exchange(told, true)) rank_->send(hub::Kind::kRefused, why);
    PollSet polled;
    if (rank_)
      polled.add(rank_->fd(), static_cast<short>(POLLIN | (rank_->queued() > 0 ? POLLOUT : 0)),
                 [this](const pollfd& ready) { rank_->act(ready.revents); });
    polled.wait(50);
    if (rank_) rank_->take([](hub::Kind, std::string_view) {});
    if (rank_ && !rank_->is_open()) rank_.reset();
  }
  program_.reset();
}

}  // namespace

int run_island_agent(const AgentOptions& options, const Key& key, const EnvironmentBlock& environment) {
  return IslandAgent(options, key, environment).run();
}

}  // namespace lockstep::hosts
