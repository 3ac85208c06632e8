#include "hosts/hosts_team.h"

#include <algorithm>
#include <climits>

#include "base/socket.h"
#include "base/text.h"
#include "hosts/start_order.h"
#include "launch/launch_error.h"

namespace lockstep::hosts {
namespace {

constexpr size_t kMostForAgent = 4 << 20;
/// The time for the agents to kill leftovers and to send the remaining output.
constexpr std::chrono::seconds kFinishTime(8);
/// A longer pause between two turns means that this process was stopped.
constexpr std::chrono::seconds kOwnPause(2);

/// The reason for a channel's end, phrased as the machine's action.
std::string deed(const std::string& reason) {
  for (const char* verb : {"has not ", "broke ", "could not "})
    if (reason.starts_with(verb)) return reason;
  return "is gone: " + reason;
}

}  // namespace

HostsTeam::HostsTeam(std::deque<Node>& nodes, Lobby& lobby, int world_size, const TeamSetup& setup, int restarts,
                     const Encryption& encryption)
    : nodes_(nodes),
      lobby_(lobby),
      relay_([this](int rank, std::string_view bytes) {
        if (Node& node = node_of(rank); node.channel)
          node.channel->send(Kind::kStore, Store{.rank = rank, .bytes = std::string(bytes)});
      }),
      told_(static_cast<size_t>(world_size)),
      finished_(nodes.size()),
      looked_(nodes.size()) {
  for (const Node& node : nodes_)
    node_of_rank_.insert(node_of_rank_.end(), static_cast<size_t>(node.host.slots), static_cast<size_t>(node.number));
  try {
    board_.emplace(world_size);
  } catch (const Error& error) {
    board_failure_ = error.what();
  }
  for (int number = 0; number < world_size; ++number) {
    Rank& rank = ranks_.emplace_back(number, log_file(setup.folder, number));
    setup.display.connect(number, rank.output);
    rank.started = Clock::now();
    auto [server, relayed] = make_socket_pair();
    store_.add_client(std::move(server));
    relay_.add(number, std::move(relayed));
  }
  for (Node& node : nodes_)
    if (node.has_ranks())
      node.channel->send(Kind::kStart, start_order(node, nodes_, world_size, setup, restarts, encryption));
}

const Node& HostsTeam::node_of(int rank) const { return nodes_[node_of_rank_[static_cast<size_t>(rank)]]; }

void HostsTeam::watch(PollSet& polled) {
  lobby_.watch(polled);
  for (Node& node : nodes_) {
    if (node.process && node.process->output_fd() >= 0)
      polled.add(node.process->output_fd(), POLLIN, [this, &node](const pollfd&) { pass_on_output(node); });
    node.watch(polled);
  }
  polled.add_all([&](std::vector<pollfd>& entries) { store_.append_polled(entries); },
                 [this](const pollfd& ready) { store_.handle(ready); });
  relay_.watch(polled, [this](int rank) {
    const Node& node = node_of(rank);
    return node.channel && node.channel->queued() < kMostForAgent;
  });
}

void HostsTeam::pass_on_output(Node& node) {
  std::string lines = node.process->read_output();
  if (lines.ends_with('\n')) lines.pop_back();
  if (!lines.empty()) messages_.push_back(node.host.name + ": " + printable(lines));
}

std::optional<Clock::time_point> HostsTeam::due() const {
  std::optional<Clock::time_point> at = lobby_.due();
  const auto sooner = [&](Clock::time_point other) { at = at ? std::min(*at, other) : other; };
  for (const Node& node : nodes_)
    if (node.channel) sooner(std::min(node.channel->next_beat(), node.channel->last_heard() + kSilence));
  return at;
}

void HostsTeam::tick() {
  const auto now = Clock::now();
  const bool was_stopped = now - ticked_ > kOwnPause;
  ticked_ = now;
  for (Node& node : nodes_) {
    if (!node.channel) continue;
    if (was_stopped) node.channel->forgive(now);
    take_messages_of(node);
    if (now - node.channel->last_heard() >= kSilence) node.channel->close("has not been heard of for 4 s");
    node.channel->beat(now);
    if (node.channel->state() == Channel::State::kClosed) {
      lose(node, deed(node.channel->reason()));
      continue;
    }
    for (int rank = node.first_rank; node.has_rank(rank); ++rank) show(node, rank, false);
  }
  for (const auto& dropped : store_.take_dropped())
    if (!dropped.reason.empty())
      messages_.push_back("rank " + std::to_string(dropped.client) +
                          " lost its connection to the key-value store: " + dropped.reason);
  lobby_.tick();
  for (const Arrival& arrival : lobby_.take_arrivals())
    Lobby::send_away(*arrival.channel, kExitNotStarted,
                     "the run at this rendezvous has started, and already has a node " +
                         std::to_string(arrival.hello.node) +
                         "; give each machine its own --node-rank, and each run its own rendezvous");
  if (const std::string news = lobby_.take_news(); !news.empty()) messages_.push_back(news);
}

void HostsTeam::take_messages_of(Node& node) {
  try {
    while (const auto message = node.channel->next(kMaxFrameBytes)) take(node, *message);
  } catch (const ProtocolError& error) {
    node.channel->close(std::string("broke the protocol: ") + error.what());
  }
}

void HostsTeam::take(Node& node, const Channel::Message& message) {
  switch (message.kind) {
    case Kind::kBeat:
      return;
    case Kind::kStarted: {
      const Started started = decode<Started>(message.body);
      for (size_t i = 0; i < started.pids.size(); ++i)
        ranks_[node.require(node.first_rank + static_cast<int>(i))].pid = started.pids[i];
      return;
    }
    case Kind::kOutput:
      return take_output(node, decode<Output>(message.body));
    case Kind::kPages:
      return take_pages(node, decode<Pages>(message.body));
    case Kind::kSeen:
      return take_seen(node, decode<Seen>(message.body));
    case Kind::kEnded:
      return take_end(node, decode<Ended>(message.body));
    case Kind::kStore: {
      const Store store = decode<Store>(message.body);
      node.require(store.rank);
      return relay_.deliver(store.rank, store.bytes);
    }
    case Kind::kFinished:
      finished_[static_cast<size_t>(node.number)] = true;
      return;
    case Kind::kSignal:
      signal_ = static_cast<int>(std::clamp<int64_t>(decode<Number>(message.body).value, 1, 64));
      return;
    case Kind::kLinkNews: {
      const News news = decode<News>(message.body);
      if (news.is_failure) return node.channel->close("could not " + printable(news.text));
      const bool is_named = news.text.find(node.host.name) != std::string::npos;
      messages_.push_back((is_named ? "" : node.host.name + ": ") + printable(news.text));
      return;
    }
    case Kind::kFailed: {
      const Failed failed = decode<Failed>(message.body);
      return node.channel->close("could not start its ranks: " + printable(failed.text));
    }
    default:
      throw ProtocolError("an unknown message, of kind " + std::to_string(static_cast<int>(message.kind)));
  }
}

void HostsTeam::take_output(Node& node, const Output& output) {
  Told& told = told_[node.require(output.rank)];
  told.waiting.at(static_cast<size_t>(output.stream) % 2) += output.bytes;
  show(node, output.rank, false);
}

void HostsTeam::show(Node& node, int rank, bool all) {
  RankOutput& output = ranks_[static_cast<size_t>(rank)].output;
  for (size_t i = 0; i < output.streams().size(); ++i) {
    std::string& waiting = told_[static_cast<size_t>(rank)].waiting[i];
    auto& stream = output.streams()[i];
    if (waiting.empty() || (!all && stream.sink != nullptr && stream.sink->full())) continue;
    const std::string bytes = std::exchange(waiting, {});
    output.take(stream, bytes);
    if (node.channel) node.channel->send(Kind::kTaken, Number{static_cast<int64_t>(bytes.size())});
  }
}

void HostsTeam::take_pages(Node& node, const Pages& pages) {
  const int64_t ahead_ns = pages.now_ns - Clock::now().time_since_epoch().count();
  for (const Page& page : pages.pages) {
    node.require(page.rank);
    if (page.bytes.size() != RankPage::kBytes) throw ProtocolError("a page of another size");
    if (board_) board_->page(page.rank).copy_from(page.bytes.data(), ahead_ns);
  }
}

void HostsTeam::take_seen(Node& node, const Seen& seen) {
  if (seen.ranks.size() != static_cast<size_t>(node.host.slots)) throw ProtocolError("news of another number of ranks");
  const bool asked = look_ && (seen.look.process_states || seen.look.processor_times);
  if (asked) looked_[static_cast<size_t>(node.number)] = true;
  for (size_t i = 0; i < seen.ranks.size(); ++i) {
    RankSeen& known = told_[static_cast<size_t>(node.first_rank) + i].seen;
    const RankSeen before = std::exchange(known, seen.ranks[i]);
    if (asked) continue;
    known.process_state = before.process_state;
    known.processor_ns = before.processor_ns;
  }
  stop_at_ = std::max(stop_at_, static_cast<uint64_t>(std::max<int64_t>(0, seen.stop_at)));
  if (!seen.stop_asked || stop_asked_) return;
  // A rank there has received a signal: those of the other machines leave with it.
  node.leaves = true;
  ask_to_leave();
}

void HostsTeam::take_end(Node& node, const Ended& ended) {
  const size_t index = node.require(ended.rank);
  Rank& rank = ranks_[index];
  if (rank.ended) return;
  if (ended.how < 0 || ended.how > static_cast<int>(ProcessEnd::Kind::kNotStarted))
    throw ProtocolError("an unknown kind of end");
  rank.ended = true;
  rank.how = {static_cast<ProcessEnd::Kind>(ended.how), ended.value};
  told_[index].error_text = ended.error_text;
  MemoryKills memory{.count = static_cast<uint64_t>(std::max<int64_t>(0, ended.memory_kills)),
                     .counted_in = printable(ended.counted_in) + " of " + node.host.name};
  if (ended.memory_limit >= 0) memory.limit_bytes = static_cast<uint64_t>(ended.memory_limit);
  ends_.push_back({.rank = ended.rank,
                   .pid = rank.pid,
                   .how = rank.how,
                   .seconds = ended.seconds,
                   .peak_bytes = static_cast<uint64_t>(std::max<int64_t>(0, ended.peak_bytes)),
                   .memory = std::move(memory)});
}

void HostsTeam::lose(Node& node, const std::string& why) {
  if (node.process) pass_on_output(node);
  messages_.push_back(node.host.name + " " + why);
  for (int number = node.first_rank; node.has_rank(number); ++number) {
    Rank& rank = ranks_[static_cast<size_t>(number)];
    if (rank.ended) continue;
    const RankStatus account = account_of(rank);
    rank.ended = true;
    rank.how = {ProcessEnd::Kind::kLost, 0};
    std::string lost = node.host.name + " " + why;
    if (!account.operation.kind.empty())
      lost += std::string("; it was ") + (account.operation.running ? "in " : "done with ") + account.operation.text();
    ends_.push_back({.rank = number,
                     .pid = rank.pid,
                     .how = rank.how,
                     .seconds = seconds_since(rank.started),
                     .lost = std::move(lost)});
  }
  node.lose();
}

RanksObserved HostsTeam::observe(bool process_states, bool processor_times) {
  RanksObserved seen;
  bool answered = look_.has_value();
  for (const Node& node : nodes_) {
    answered = answered && (!node.channel || !node.has_ranks() || looked_[static_cast<size_t>(node.number)]);
    if (!node.channel) seen.lost_ranks += node.host.slots;
  }
  seen.processor_times = processor_times && answered && look_->processor_times;
  for (const Rank& rank : ranks_) {
    const RankSeen& told = told_[static_cast<size_t>(rank.number)].seen;
    RankView view = view_of(rank);
    view.outlived = rank.ended && told.outlived;
    if (process_states && answered && !rank.ended) view.process_state = static_cast<char>(told.process_state);
    if (seen.processor_times && told.processor_ns >= 0)
      view.processor_time = std::chrono::nanoseconds(told.processor_ns);
    seen.ranks.push_back(std::move(view));
  }
  // The answer serves the next look.
  if ((process_states || processor_times) && (answered || !look_)) {
    look_ = Look{.process_states = process_states, .processor_times = processor_times};
    looked_.assign(nodes_.size(), false);
    for (Node& node : nodes_)
      if (node.channel) node.channel->send(Kind::kLook, *look_);
  }
  seen.stop_asked = stop_asked_;
  seen.stop_at = stop_at_;
  seen.resize_to = wanted_ranks();
  return seen;
}

/// The number of ranks requested by `lockstep resize`, if the remaining machines have that many places.
int HostsTeam::wanted_ranks() {
  const int wanted = board_ ? static_cast<int>(std::min<uint32_t>(board_->head().resize_to.load(), INT_MAX)) : 0;
  int places = 0;
  for (const Node& node : nodes_) places += node.channel ? node.most_slots : 0;
  if (wanted <= places) return wanted;
  if (std::exchange(refused_, wanted) != wanted)
    messages_.push_back(std::to_string(wanted) + " ranks are wanted, but the remaining machines have places for " +
                        std::to_string(places));
  return 0;
}

void HostsTeam::tell_all(Kind kind) {
  for (Node& node : nodes_)
    if (node.channel) node.channel->send(kind);
}

void HostsTeam::ask_to_leave() {
  stop_asked_ = true;
  if (board_) board_->head().stop_asked.store(1);
  tell_all(Kind::kAsk);
}

void HostsTeam::stop(int signal) {
  for (Node& node : nodes_)
    if (node.channel) node.channel->send(Kind::kStop, Number{signal});
}

void HostsTeam::kill() { tell_all(Kind::kKill); }

void HostsTeam::finish() {
  tell_all(Kind::kFinish);
  const Deadline deadline(kFinishTime);
  PollSet polled;
  const auto is_done = [&](const Node& node) {
    return !node.channel || !node.has_ranks() || finished_[static_cast<size_t>(node.number)];
  };
  while (!std::all_of(nodes_.begin(), nodes_.end(), is_done) && !deadline.passed()) {
    polled.clear();
    for (Node& node : nodes_) node.watch(polled);
    polled.wait(std::min(deadline.remaining_ms(), 200));
    tick();
  }
  for (Rank& rank : ranks_) {
    show(node_of(rank.number), rank.number, true);
    rank.output.finish();
  }
}

std::string HostsTeam::host_of(int rank) const { return node_of(rank).host.name; }

std::string HostsTeam::error_text(int rank) const { return told_[static_cast<size_t>(rank)].error_text; }

}  // namespace lockstep::hosts
