#include "hosts/keep_states.h"

#include <algorithm>

#include "base/state_memory.h"
#include "base/text.h"
#include "launch/diagnosis/failure_report.h"
#include "launch/poll_set.h"

namespace lockstep::hosts {
namespace {

/// Beats continue meanwhile; without them the agent is given up after kSilence.
constexpr std::chrono::minutes kLongestSave(30);

/// Null if the agent is gone, or takes too long.
std::optional<Kept> answer_of(Node& node) {
  PollSet polled;
  for (const Deadline deadline(kLongestSave); !deadline.passed();) {
    polled.clear();
    node.watch(polled);
    polled.wait(std::min(deadline.remaining_ms(), 200));
    while (const auto message = node.channel->next(kMaxFrameBytes))
      if (message->kind == Kind::kKept) return decode<Kept>(message->body);
    const auto now = Clock::now();
    node.channel->beat(now);
    if (node.channel->state() == Channel::State::kClosed || now - node.channel->last_heard() >= kSilence) break;
  }
  return {};
}

KeptState keep_on(Node& node, const Keep& order) {
  KeptState state;
  try {
    node.channel->send(Kind::kKeep, order);
    const auto kept = answer_of(node);
    if (!kept) throw ProtocolError("it has not answered");
    state = {.step = kept->step,
             .path = printable(kept->path),
             .path_step = kept->path_step,
             .written = kept->written,
             .problem = printable(kept->problem)};
  } catch (const ProtocolError& error) {
    state.problem = error.what();
  }
  if (!state.problem.empty()) state.problem.insert(0, node.host.name + ": ");
  return state;
}

}  // namespace

std::string describe(const KeptState& kept) {
  if (kept.step < 0 && kept.path.empty()) return "";
  return describe(StateLeft{.path = kept.path,
                            .step = kept.path_step,
                            .in_memory = kept.step,
                            .written = kept.written,
                            .problem = kept.problem},
                  /*goes_on=*/false);
}

KeptState keep_states(std::deque<Node>& nodes, const std::string& other_folder, bool is_sound) {
  KeptState best{.problem = "the machines that held it are gone"};
  bool found = false;
  for (Node& node : nodes) {
    if (!node.channel || !node.channel->is_open()) continue;
    const KeptState state = keep_on(node, {.other_folder = other_folder, .is_sound = is_sound});
    const bool better = !state.path.empty() && (best.path.empty() || state.path_step > best.path_step);
    const bool first_writer = best.written && state.path_step == best.path_step;
    const int64_t step = std::max(best.step, state.step);
    if (!found || (better && !first_writer)) best = state;
    best.step = step;
    found = true;
  }
  return best;
}

MachineMemory::MachineMemory() : memory_(StateMemory::make()) {}

void MachineMemory::write(const Keep& order) {
  written_ =
      std::async(std::launch::async, [fd = fd(), order] { return keep_state(fd, order.other_folder, order.is_sound); });
}

std::optional<KeptState> MachineMemory::written(std::chrono::milliseconds time) {
  if (!written_.valid() || written_.wait_for(time) != std::future_status::ready) return std::nullopt;
  return written_.get();
}

}  // namespace lockstep::hosts
