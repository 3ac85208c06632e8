#include "hosts/reported_team.h"

#include <algorithm>
#include <iostream>

#include "base/socket.h"
#include "launch/launch_error.h"

namespace lockstep::hosts {
namespace {

constexpr std::chrono::milliseconds kSeenEvery(500);
/// Output in flight that the coordinator has not taken yet.
constexpr size_t kMostUntaken = 1 << 20;
constexpr size_t kMostToSend = 4 << 20;

}  // namespace

ReportedTeam::ReportedTeam(Channel& channel, const TeamSetup& setup, const Start& order, const std::string& address,
                           LinkProcess* links)
    : channel_(channel),
      links_(links),
      ends_(LinkAddresses(order.links.first_address, static_cast<int>(order.links.machines.size()))),
      relay_([this](int rank, std::string_view bytes) {
        channel_.send(Kind::kStore, Store{.rank = rank, .bytes = std::string(bytes)});
      }),
      team_(setup, order.restarts, share_of(order, address)) {
  Started started;
  for (const Rank& rank : team_.ranks()) started.pids.push_back(rank.pid);
  channel_.send(Kind::kStarted, started);
}

MachineShare ReportedTeam::share_of(const Start& order, const std::string& address) {
  MachineShare share{.first_rank = order.first_rank,
                     .count = order.slots,
                     .world_size = order.world_size,
                     .node = order.node,
                     .nodes = order.nodes,
                     .address = address,
                     .master_address = order.master_address,
                     .terminal_rank = order.terminal_rank,
                     .terminal_columns = order.terminal_columns};
  share.connect_to_store = [this](int rank) {
    auto [ours, theirs] = make_socket_pair();
    relay_.add(rank, std::move(ours));
    return std::move(theirs);
  };
  share.take_output = [this](int rank, size_t stream, std::string_view bytes) {
    untaken_ += bytes.size();
    channel_.send(Kind::kOutput, Output{.rank = rank, .stream = static_cast<int>(stream), .bytes = std::string(bytes)});
  };
  share.takes_output = [this] { return untaken_ < kMostUntaken; };
  return share;
}

void ReportedTeam::watch(PollSet& polled) {
  team_.watch(polled);
  relay_.watch(polled, [this](int) { return channel_.queued() < kMostToSend; });
}

void ReportedTeam::take(const Channel::Message& message) {
  switch (message.kind) {
    case Kind::kTaken:
      untaken_ -= std::min(untaken_, static_cast<size_t>(std::max<int64_t>(0, decode<Number>(message.body).value)));
      return;
    case Kind::kStop:
      return team_.stop(static_cast<int>(decode<Number>(message.body).value));
    case Kind::kKill:
      return team_.kill();
    case Kind::kAsk:
      return team_.ask_to_leave();
    case Kind::kLook:
      return tell_seen(decode<Look>(message.body));
    case Kind::kStore: {
      const Store store = decode<Store>(message.body);
      open_links(store);
      return relay_.deliver(store.rank, store.bytes);
    }
    default:
      throw ProtocolError("an unknown message, of kind " + std::to_string(static_cast<int>(message.kind)));
  }
}

void ReportedTeam::open_links(const Store& store) {
  if (links_ == nullptr) return;
  try {
    for (const LinkEnd& end : ends_.find(store.rank, store.bytes)) links_->open(end);
  } catch (const LaunchError& error) {
    channel_.send(Kind::kFailed, Failed{.exit_code = error.exit_code, .text = error.what()});
  }
}

void ReportedTeam::finish() {
  team_.finish();
  tell_ends();
  tell_pages();
  team_.await_end();
}

void ReportedTeam::end() {
  team_.kill();
  team_.finish();
  team_.await_end();
}

void ReportedTeam::tell() {
  tell_ends();
  const auto now = Clock::now();
  if (now < tell_at_) return;
  tell_at_ = now + kTellEvery;
  tell_pages();
  const bool stop_asked = team_.board() != nullptr && team_.board()->head().stop_asked.load() != 0;
  if (now < seen_at_ && stop_asked == stop_told_) return;
  seen_at_ = now + kSeenEvery;
  stop_told_ = stop_asked;
  tell_seen({});
}

void ReportedTeam::tell_pages() {
  if (team_.board() == nullptr) return;
  Pages changed{.now_ns = Clock::now().time_since_epoch().count()};
  for (const Rank& rank : team_.ranks()) {
    std::string bytes(reinterpret_cast<const char*>(&team_.board()->page(rank.number)), RankPage::kBytes);
    std::string& told = pages_[rank.number];
    if (bytes == told) continue;
    told = bytes;
    changed.pages.push_back({rank.number, std::move(bytes)});
  }
  if (!changed.pages.empty()) channel_.send(Kind::kPages, changed);
}

void ReportedTeam::tell_seen(const Look& look) {
  const RanksObserved seen = team_.observe(look.process_states, look.processor_times);
  Seen message{.look = look, .stop_asked = seen.stop_asked, .stop_at = static_cast<int64_t>(seen.stop_at)};
  for (const RankView& view : seen.ranks)
    message.ranks.push_back(
        {.outlived = view.outlived,
         .process_state = view.process_state,
         .processor_ns = view.processor_time
                             ? std::chrono::duration_cast<std::chrono::nanoseconds>(*view.processor_time).count()
                             : -1});
  channel_.send(Kind::kSeen, message);
}

void ReportedTeam::tell_ends() {
  for (const std::string& message : team_.take_messages()) std::cerr << "lockstep: " << message << "\n";
  const auto ends = team_.take_ends();
  if (ends.empty()) return;
  tell_pages();  // a rank's last writes explain its end
  for (const RankEnd& end : ends)
    channel_.send(Kind::kEnded,
                  Ended{.rank = end.rank,
                        .how = static_cast<int>(end.how.kind),
                        .value = end.how.value,
                        .seconds = end.seconds,
                        .peak_bytes = static_cast<int64_t>(end.peak_bytes),
                        .error_text = team_.error_text(end.rank),
                        .memory_kills = static_cast<int64_t>(end.memory.count),
                        .counted_in = end.memory.counted_in,
                        .memory_limit = end.memory.limit_bytes ? static_cast<int64_t>(*end.memory.limit_bytes) : -1});
}

}  // namespace lockstep::hosts
