#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <sstream>

#include "base/hash.h"
#include "base/rank_names.h"
#include "c/guarded.h"
#include "c/meet.h"
#include "collectives/shm/segment/bootstrap.h"
#include "rank_page/rank_board.h"
#include "rendezvous/world.h"

namespace lockstep::c {
namespace {

constexpr double kJoinTimeout = 120, kTimeout = 1800;  // as in Context

/// While a rank is stopped in a debugger, the others wait.
constexpr std::chrono::hours kDebuggedTimeout{24 * 7};

/// The process that has a world; 0: none. Its forked children do not have one.
std::atomic<pid_t> holder{0};

/// Tells the launcher that this rank waits for the others; withdraws that if they do not meet.
class Joining {
 public:
  Joining() {
    if (holder.exchange(::getpid()) == ::getpid())
      throw StatusError(LOCKSTEP_INVALID_ARGUMENT,
                        "lockstep_join: this process already has a world, and may have only one at a time; use that "
                        "one, or leave it before you join again");
    own_page().set_phase(RankStatus::Phase::kJoining);
  }
  ~Joining() {
    own_page().set_phase(done_ ? RankStatus::Phase::kJoined : RankStatus::Phase::kUnknown);
    if (!done_) holder = 0;
  }
  Joining(const Joining&) = delete;
  void done() { done_ = true; }

 private:
  bool done_ = false;
};

std::chrono::milliseconds limit(const char* name, double seconds, double otherwise) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e8)
    refuse("lockstep_join", std::string(name) + " is " + std::to_string(seconds) +
                                "; set it to a number of seconds, or to 0 for the default of " +
                                std::to_string(static_cast<int>(otherwise)));
  return std::chrono::milliseconds(std::max<int64_t>(1, std::llround(1000 * (seconds == 0 ? otherwise : seconds))));
}

/// What ranks tell each other when they have met. `place` is that of the rank's GroupsNote.
struct Greeting {
  int64_t timeout_ms = 0;
  uint64_t place = 0;
};

/// When it returns, no rank needs the store any more.
/// REQUIRES: every rank calls it.
std::vector<Greeting> greet(shm::Communicator& group, std::chrono::milliseconds timeout,
                            std::chrono::milliseconds patience) {
  const auto* const note = new (group.allocate(sizeof(shm::GroupsNote))) shm::GroupsNote();
  const Greeting mine{.timeout_ms = timeout.count(), .place = group.arena()->offset(note)};
  std::vector<Greeting> all(static_cast<size_t>(group.size()));
  group.run({.kind = shm::OperationKind::kAllGather,
             .type = shm::DataType::kUInt8,
             .count = sizeof mine,
             .input = &mine,
             .output = all.data()},
            patience);
  return all;
}

void require_same_timeout(const std::vector<Greeting>& all) {
  const auto seconds = [](int64_t ms) {
    std::ostringstream text;
    text << static_cast<double>(ms) / 1000 << " s";
    return text.str();
  };
  for (size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank].timeout_ms != all[0].timeout_ms)
      throw StatusError(LOCKSTEP_JOIN_FAILED, "lockstep_join: timeout_s is " + seconds(all[rank].timeout_ms) +
                                                  " on rank " + std::to_string(rank) + " and " +
                                                  seconds(all[0].timeout_ms) + " on rank 0; set it alike on all ranks");
}

/// Prepares the search for ranks that wait for each other in different groups of this world.
void start_search(GroupState& state, std::chrono::milliseconds timeout, std::chrono::milliseconds patience) {
  if (state.group.size() == 1) return;
  const std::vector<Greeting> all = greet(state.group, timeout, patience);
  require_same_timeout(all);
  std::vector<uint64_t> places;
  shm::SearchedGroup names{.id = Hash::kStart, .ranks = {}, .name = "the world"};
  for (const Greeting& one : all) {
    names.ranks.push_back(static_cast<int>(places.size()));
    places.push_back(one.place);
  }
  state.search_with(std::make_shared<shm::GroupsSearch>(state.group.world(), places), std::move(names));
}

/// Those of a part with these ranks of the whole, in its split with this number.
shm::SearchedGroup names_of_part(const GroupState& whole, int number, const std::vector<size_t>& members) {
  shm::SearchedGroup names{.id = Hash::mixed(whole.names.id, static_cast<uint64_t>(number)), .ranks = {}, .name = {}};
  for (const size_t member : members) {
    names.ranks.push_back(whole.names.ranks[member]);
    names.id = Hash::mixed(names.id, member);
  }
  std::vector<int> ascending = names.ranks;
  std::sort(ascending.begin(), ascending.end());
  const std::string of = whole.is_world ? "subgroup " : whole.names.name.substr(0, whole.names.name.find(" (")) + ".";
  names.name = of + std::to_string(number) + " (" + rank_names(ascending) + ")";
  return names;
}

lockstep_group* join(const lockstep_options& options) {
  const Environment environment = Environment::from_process();
  auto timeout = limit("timeout_s", options.timeout_s, kTimeout);
  auto patience = join_timeout(environment, limit("join_timeout_s", options.join_timeout_s, kJoinTimeout));
  if (environment.lockstep_debugged) timeout = patience = kDebuggedTimeout;
  Joining joining;
  const World world = discover_world_of_one_machine(environment);
  own_page().set_collective_timeout(timeout);
  Meeting meeting = meet(world, environment, patience);
  auto group = std::make_unique<lockstep_group>();
  group->state = std::make_shared<GroupState>(std::move(meeting.world), timeout, /*is_world=*/true);
  start_search(*group->state, timeout, patience);
  joining.done();
  return group.release();
}

/// Gathers texts of all ranks of a group, by two of its collectives.
std::vector<std::string> gather_texts(GroupState& state, const std::string& mine) {
  const auto size = static_cast<size_t>(state.group.size());
  std::vector<int64_t> lengths(size);
  const auto length = static_cast<int64_t>(mine.size());
  state.group.run({.kind = shm::OperationKind::kAllGather,
                   .type = shm::DataType::kInt64,
                   .count = 1,
                   .input = &length,
                   .output = lengths.data()},
                  state.timeout);
  const auto longest = static_cast<size_t>(*std::max_element(lengths.begin(), lengths.end()));
  std::string padded = mine, all(size * longest, '\0');
  padded.resize(longest);
  if (longest > 0)
    state.group.run({.kind = shm::OperationKind::kAllGather,
                     .type = shm::DataType::kUInt8,
                     .count = longest,
                     .input = padded.data(),
                     .output = all.data()},
                    state.timeout);
  std::vector<std::string> texts;
  for (size_t r = 0; r < size; ++r) texts.push_back(all.substr(r * longest, static_cast<size_t>(lengths[r])));
  return texts;
}

/// The members of this rank's part, as ranks of the whole group, in the order of their new ranks.
std::vector<size_t> members_of(GroupState& state, int color, int key) {
  struct Choice {
    int32_t color, key;
  };
  const Choice mine{color, key};
  std::vector<Choice> all(static_cast<size_t>(state.group.size()));
  state.group.run({.kind = shm::OperationKind::kAllGather,
                   .type = shm::DataType::kInt32,
                   .count = 2,
                   .input = &mine,
                   .output = all.data()},
                  state.timeout);
  std::vector<size_t> members;
  for (size_t r = 0; r < all.size(); ++r)
    if (all[r].color == color) members.push_back(r);
  std::stable_sort(members.begin(), members.end(), [&](size_t a, size_t b) { return all[a].key < all[b].key; });
  return members;
}

/// Every rank of `whole` calls it, even without a color, because the texts of all parts are exchanged together.
lockstep_group* split(GroupState& whole, int color, int key) {
  const std::vector<size_t> members = members_of(whole, color, key);
  const int number = whole.splits++;
  size_t place = 0;
  while (color >= 0 && members[place] != static_cast<size_t>(whole.group.rank())) ++place;
  int rounds = 0;
  const auto exchange = [&](const std::string& mine) {
    const std::vector<std::string> all = gather_texts(whole, mine);
    ++rounds;
    std::vector<std::string> theirs;
    for (const size_t member : members) theirs.push_back(all[member]);
    return theirs;
  };
  std::unique_ptr<lockstep_group> part;
  if (color >= 0) {
    shm::World world = shm::bootstrap(static_cast<int>(place), static_cast<int>(members.size()), exchange);
    part = std::make_unique<lockstep_group>();
    part->state = std::make_shared<GroupState>(std::move(world), whole.timeout, /*is_world=*/false);
    if (whole.search) part->state->search_with(whole.search, names_of_part(whole, number, members));
  }
  constexpr int kRounds = 2;  // of bootstrap()
  while (rounds < kRounds) exchange("");
  return part.release();
}

void leave(lockstep_group* group) {
  const std::shared_ptr<GroupState> state = std::exchange(group->state, nullptr);
  if (state == nullptr) refuse("lockstep_leave", "this rank has already left the group");
  if (state->is_world && holder.load() == ::getpid()) {
    own_page().set_phase(RankStatus::Phase::kLeft);
    holder = 0;
  }
  keep_memory(state);
  state->group.leave();
}

}  // namespace
}  // namespace lockstep::c

using namespace lockstep::c;

lockstep_status lockstep_join(const lockstep_options* options, lockstep_group** world) {
  return guarded(nullptr, LOCKSTEP_JOIN_FAILED, [&] {
    if (world == nullptr) refuse("lockstep_join", "world is null; give a pointer for the group");
    *world = nullptr;
    *world = join(options == nullptr ? lockstep_options{} : complete("lockstep_join", "lockstep_options", *options));
  });
}

lockstep_status lockstep_leave(lockstep_group* group) {
  return guarded(nullptr, LOCKSTEP_INVALID_ARGUMENT, [&] {
    if (group != nullptr) leave(group);
  });
}

lockstep_status lockstep_split(lockstep_group* group, int color, int key, lockstep_group** part) {
  return guarded("lockstep_split", group, [&](const std::shared_ptr<GroupState>& state) {
    if (part == nullptr) refuse("lockstep_split", "part is null; give a pointer for the new group");
    *part = nullptr;
    try {
      *part = split(*state, color, key);
    } catch (const lockstep::LimitError&) {
      throw;
    } catch (const lockstep::Error& error) {
      if (lockstep::shm::Verdict::exists(state->group.world())) throw;
      throw StatusError(LOCKSTEP_JOIN_FAILED, std::string("lockstep_split: ") + error.what());
    }
  });
}

lockstep_status lockstep_abort(lockstep_group* group, const char* why) {
  if (group == nullptr || group->state == nullptr)
    return guarded(nullptr, LOCKSTEP_INTERNAL_ERROR, [&] {
      refuse("lockstep_abort", group == nullptr ? "the group is null" : "this rank has left the group");
    });
  return guarded(group->state.get(), LOCKSTEP_INVALID_ARGUMENT,
                 [&] { group->state->group.abort(why == nullptr ? "lockstep_abort was called" : why); });
}

int lockstep_rank(const lockstep_group* group) {
  return group == nullptr || group->state == nullptr ? -1 : group->state->group.rank();
}
int lockstep_size(const lockstep_group* group) {
  return group == nullptr || group->state == nullptr ? -1 : group->state->group.size();
}
