#include "collectives/shm/protocol/verdict.h"

#include <bit>
#include <cstring>
#include <vector>

#include "base/rank_names.h"
#include "base/text.h"
#include "collectives/message_tags.h"
#include "collectives/purpose.h"
#include "collectives/shm/protocol/channels.h"
#include "collectives/shm/protocol/request.h"
#include "collectives/stuck_ranks.h"
#include "collectives/timeout_hint.h"
#include "rank_page/rank_board.h"

namespace lockstep::shm {

namespace {

/// "all_reduce(float32, 43 elements, sum) of bucket 1 of 2 (a to b)".
std::string called(const World& world, int rank, uint64_t sequence) {
  return call_of_purpose(Header(world.line(rank, sequence).header).text(),
                         label_of(world, rank, sequence).load(sequence));
}

}  // namespace

std::string announced(const World& world, int rank, uint64_t sequence) {
  const Line& line = world.line(rank, sequence);
  std::string number = "operation " + std::to_string(sequence);
  if (Announcement::sequence(line.word.load(std::memory_order_acquire)) != sequence) return number;  // from announce()
  return number + ", " + called(world, rank, sequence);
}

namespace {

std::string last_announced(const World& world, int rank) {
  uint64_t last = 0;
  for (const Line& line : world.control(rank).ring)
    last = std::max(last, Announcement::sequence(line.word.load(std::memory_order_acquire)));
  return last == 0 ? "it had not started any operation"
                   : "the last operation it started was " + announced(world, rank, last);
}

std::string rank_name(const World& world, int rank) { return "rank " + std::to_string(world.numbers().name_of(rank)); }

/// "a recv from rank 1 with tag 7".
std::string message_text(const World& world, uint64_t message, uint64_t tag) {
  if (message == 0) return "a send or recv";
  const Message::Description what(message);
  const std::string peer = what.peer == kAnySource ? "any rank" : rank_name(world, what.peer);
  return (what.is_send ? "a send to " : "a recv from ") + peer + " with tag " +
         std::to_string(static_cast<int64_t>(tag));
}

std::string names_of(const World& world, uint64_t ranks) {
  std::vector<int> names;
  for (; ranks != 0; ranks &= ranks - 1) names.push_back(world.numbers().name_of(std::countr_zero(ranks)));
  return rank_names(names);
}

std::string split_text(const World& world, int reporter, int culprit, uint64_t sequence) {
  // Both tables are in the eager area: counts to send to each rank, then counts to receive from each.
  const auto counts = [&](int rank) {
    const Line& line = world.line(rank, sequence);
    return reinterpret_cast<const uint64_t*>(world.eager(rank) + line.where.eager);
  };
  const auto n = static_cast<size_t>(world.size());
  const auto a = static_cast<size_t>(reporter), b = static_cast<size_t>(culprit);
  std::string text = "all_to_all, operation " + std::to_string(sequence) + ": ";
  const auto pair = [&](size_t from, size_t to) {
    const uint64_t sent = counts(static_cast<int>(from))[to], expected = counts(static_cast<int>(to))[n + from];
    if (sent == expected) return std::string();
    return "rank " + std::to_string(from) + " sends " + counted(static_cast<int64_t>(sent), "element", "elements") +
           " to rank " + std::to_string(to) + ", which expects " + std::to_string(expected) + "; ";
  };
  return text + pair(a, b) + (a == b ? "" : pair(b, a)) + "nothing was moved";
}

}  // namespace

void Verdict::note(const World& world, const std::string& said) const {
  const auto fail = [&](RankFailure failure, int rank, int opponent = -1) {
    own_page().fail(failure, world.numbers().launched_rank(rank), said,
                    opponent < 0 ? -1 : world.numbers().launched_rank(opponent));
  };
  switch (cause) {
    case Cause::kNone:
      return;
    case Cause::kDied:
    case Cause::kLeft:
      // The accused rank reads this only if it is still there.
      return fail(RankFailure::kPeer, culprit);
    case Cause::kMismatch:
    case Cause::kSplits:
    case Cause::kMessage:
    case Cause::kStuck:
    case Cause::kStuckInGroups:
      if (culprit == world.rank()) return fail(RankFailure::kMismatch, reporter);
      return fail(RankFailure::kMismatch, culprit, reporter == world.rank() ? -1 : reporter);
    case Cause::kTimeout: {
      const uint64_t missing = world.control(reporter).missing.load(std::memory_order_acquire);
      return fail(RankFailure::kMissing, missing == 0 ? reporter : std::countr_zero(missing) % world.size());
    }
    case Cause::kAborted:
      return fail(reporter == world.rank() ? RankFailure::kOwn : RankFailure::kPeer, reporter);
  }
}

uint64_t Verdict::pack() const {
  return static_cast<uint64_t>(cause) | static_cast<uint64_t>(reporter) << 8 | static_cast<uint64_t>(culprit) << 16;
}

Verdict Verdict::unpack(uint64_t word, const World& world) {
  const auto reporter = static_cast<int>(word >> 8 & 255);
  const Control& control = world.control(reporter);
  return {static_cast<Cause>(word & 255),
          reporter,
          static_cast<int>(word >> 16 & 255),
          control.stopped_at.load(std::memory_order_acquire),
          control.stopped_in.load(std::memory_order_acquire),
          control.stopped_tag.load(std::memory_order_acquire)};
}

Verdict Verdict::declare(const World& world) const {
  // If this rank's own verdict stands, its sequence must not change.
  if (exists(world)) return current(world);
  uint64_t existing = 0;
  world.mine().stopped_at.store(sequence, std::memory_order_release);
  if (message != 0) {
    world.mine().stopped_in.store(message, std::memory_order_release);
    world.mine().stopped_tag.store(message_tag, std::memory_order_release);
  }
  // Releases all that the verdict refers to; exists() and current() acquire it.
  const bool first = world.verdict().compare_exchange_strong(existing, pack());
  world.notify_all();
  return first ? *this : unpack(existing, world);
}

std::string Verdict::text(const World& world) const {
  const std::string who = rank_name(world, reporter), other = rank_name(world, culprit);
  const std::string where =
      sequence == 0 ? message_text(world, message, message_tag) : announced(world, reporter, sequence);
  const bool receives = sequence == 0 && message != 0 && !Message::Description(message).is_send;
  const std::string of_messages = receives ? " " + unreceived(other, who, world.control(reporter).abort_text) : "";
  switch (cause) {
    case Cause::kNone:
      return "no error";
    case Cause::kDied:
      return other + " (" + (culprit == world.rank() ? "this process" : world.watch(culprit).text()) +
             ") ended while " + who + " waited for it in " + where + "; " + last_announced(world, culprit) +
             ". Look at the end of that rank's output." + of_messages;
    case Cause::kLeft: {
      // It holds 1 plus the number of collectives that the rank has started.
      const bool left_it = sequence != 0 && world.control(culprit).closed.load(std::memory_order_acquire) > sequence;
      return other + " has already left the group, but " + who + " called " + where + "; " +
             last_announced(world, culprit) +
             (left_it               ? ", for which it did not wait. Wait for every Work before you leave the group."
              : of_messages.empty() ? ". All ranks must call the same operations."
                                    : "." + of_messages);
    }
    case Cause::kMismatch:
      return "ranks disagree on operation " + std::to_string(sequence) + ": " + who + " called " +
             called(world, reporter, sequence) + ", " + other + " called " + called(world, culprit, sequence) +
             ". Nothing was moved. All ranks must call the same operations in the same order." +
             advice_on({label_of(world, reporter, sequence).load(sequence),
                        label_of(world, culprit, sequence).load(sequence)});
    case Cause::kSplits:
      return split_text(world, reporter, culprit, sequence);
    case Cause::kMessage:
      return who + " received a message from " + other +
             " into a buffer of another dtype or size: " + world.control(reporter).abort_text;
    case Cause::kTimeout: {
      const uint64_t missing = world.control(reporter).missing.load(std::memory_order_acquire);
      return who + " gave up waiting in " + where + ": " + world.control(reporter).abort_text + ", missing " +
             names_of(world, missing) + timeout_hint;
    }
    case Cause::kAborted:
      return who + " aborted the group: " + world.control(reporter).abort_text;
    case Cause::kStuck:
      return std::string("ranks wait for each other's messages: ") + world.control(reporter).abort_text + kStuckHint;
    case Cause::kStuckInGroups:
      return std::string("the ranks wait for each other, so none can go on: ") + world.control(reporter).abort_text +
             ". Every rank must use its groups in the same order, or start operations before it waits for any.";
  }
  return "unknown error";
}

}  // namespace lockstep::shm
