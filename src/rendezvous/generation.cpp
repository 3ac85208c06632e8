// Only an answer shows that a key in the store belongs to a live rank. So rank 0 asks:
//
//   rank r   draws a ticket: the next number of its own counter         meet/ticket/<r>
//   rank 0   calls the last ticket of each rank, by its own ticket      meet/call/<r>/<ticket> = <ticket of rank 0>
//   rank r   waits for the call of its ticket, and answers              meet/answer/<ticket of rank 0>/<r> = <size>
//   rank 0   says so when all have answered, or what is wrong           meet/complete/<ticket of rank 0>
//   rank r   has read what is wrong                                     meet/read/<ticket of rank 0>/<r>
//
// A call for the ticket of a process that has ended gets no answer; when its successor draws the next ticket, rank 0
// calls that one. A call follows its ticket, so a rank that is called knows that rank 0 has been alive since it drew
// the ticket. The ticket of rank 0 is the number of the generation. meet/bell counts tickets and answers, so that rank
// 0 watches only one key while it waits.

#include "rendezvous/generation.h"

#include <algorithm>
#include <optional>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/interruption.h"

namespace lockstep {
namespace {

constexpr const char* kBell = "meet/bell";

std::string ticket_key(int rank) { return "meet/ticket/" + std::to_string(rank); }
std::string call_key(int rank, const std::string& ticket) { return "meet/call/" + std::to_string(rank) + "/" + ticket; }
std::string answer_key(const std::string& leader, int rank) {
  return "meet/answer/" + leader + "/" + std::to_string(rank);
}
std::string complete_key(const std::string& leader) { return "meet/complete/" + leader; }
std::string read_key(const std::string& leader, int rank) { return "meet/read/" + leader + "/" + std::to_string(rank); }
constexpr const char* kComplete = "1";
constexpr std::chrono::seconds kToBeRead{2};
std::string prefix_of(const std::string& leader) { return "start" + leader; }

/// Reads a counter, or an answer, without creating it: some stores grow with every addition.
std::string count_of(MeetingStore& store, const std::string& key) { return store.check(key) ? store.get(key) : ""; }

/// Sleeps long enough to cost nothing, and for a small part of the time waited so far. Throws an Interruption.
void back_off(const Clock::time_point& start) {
  check_for_interruption();
  const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start);
  std::this_thread::sleep_for(
      std::clamp(waited / 16, std::chrono::microseconds(100), std::chrono::microseconds(20'000)));
}

/// Tells all ranks that have answered, and throws, if an answer has another world size.
void check_size(MeetingStore& store, int rank, const std::string& leader, const std::string& size, int world_size) {
  if (size == std::to_string(world_size)) return;
  const std::string text = "rank 0 was started as one of " + std::to_string(world_size) + " ranks, rank " +
                           std::to_string(rank) + " as one of " + size +
                           "; give all ranks the same world size (WORLD_SIZE)";
  store.set(complete_key(leader), text);
  // This process may serve the store, which is gone when it ends.
  const auto start = Clock::now();
  const auto waits = [&](int other) {
    return store.check(answer_key(leader, other)) && !store.check(read_key(leader, other));
  };
  for (const Deadline deadline(kToBeRead); !deadline.passed(); back_off(start)) {
    bool any = false;
    for (int other = 1; other < world_size && !any; ++other) any = waits(other);
    if (!any && !waits(rank)) break;
  }
  throw Error(text);
}

Generation lead(MeetingStore& store, int world_size, const Deadline& deadline) {
  const auto start = Clock::now();
  const std::string own = std::to_string(store.add(ticket_key(0), 1));
  std::vector<std::string> called(static_cast<size_t>(world_size));
  std::vector<int> missing;
  for (int rank = 1; rank < world_size; ++rank) missing.push_back(rank);
  for (std::optional<std::string> heard;; back_off(start)) {
    if (std::string rung = count_of(store, kBell); rung != heard) {
      heard = std::move(rung);
      std::erase_if(missing, [&](int rank) {
        const std::string size = count_of(store, answer_key(own, rank));
        if (!size.empty()) check_size(store, rank, own, size, world_size);
        return !size.empty();
      });
      for (const int rank : missing) {
        std::string& last = called[static_cast<size_t>(rank)];
        std::string ticket = count_of(store, ticket_key(rank));
        if (ticket != last) store.set(call_key(rank, ticket), own);
        last = std::move(ticket);
      }
    }
    if (missing.empty()) {
      store.set(complete_key(own), kComplete);
      return {.prefix = prefix_of(own), .missing = {}};
    }
    if (deadline.passed()) return {.prefix = "", .missing = std::move(missing)};
  }
}

Generation follow(MeetingStore& store, int rank, int world_size, std::chrono::milliseconds timeout) {
  const auto start = Clock::now();
  const auto left = [&] {
    const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
    return std::max(timeout - passed, std::chrono::milliseconds(1));
  };
  // The ranks that have not written their key; rank 0 has none.
  const auto without = [&](const auto& key) {
    std::vector<int> missing;
    for (int other = 1; other < world_size; ++other)
      if (!store.check(key(other))) missing.push_back(other);
    return missing;
  };
  const Deadline deadline(timeout);
  const std::string call = call_key(rank, std::to_string(store.add(ticket_key(rank), 1)));
  store.add(kBell, 1);
  std::string leader;
  try {
    store.wait({call}, left());
    leader = store.get(call);
    store.set(answer_key(leader, rank), std::to_string(world_size));
    store.add(kBell, 1);
    store.wait({complete_key(leader)}, left());
  } catch (const Interruption&) {
    throw;
  } catch (const std::exception&) {
    if (!deadline.passed()) throw;
    // Without rank 0, only ranks that have never come are known to be missing.
    std::vector<int> missing =
        leader.empty() ? without(ticket_key) : without([&](int r) { return answer_key(leader, r); });
    if (leader.empty() || missing.empty()) missing.insert(missing.begin(), 0);
    return {.prefix = "", .missing = std::move(missing)};
  }
  if (const std::string said = store.get(complete_key(leader)); said != kComplete) {
    store.set(read_key(leader, rank), "1");
    throw Error(said);
  }
  return {.prefix = prefix_of(leader), .missing = {}};
}

}  // namespace

Generation agree_on_generation(MeetingStore& store, int rank, int world_size, std::chrono::milliseconds timeout) {
  return rank == 0 ? lead(store, world_size, Deadline(timeout)) : follow(store, rank, world_size, timeout);
}

}  // namespace lockstep
