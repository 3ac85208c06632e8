#include "collectives/group_state.h"

#include <exception>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/library_thread.h"
#include "base/machine_name.h"
#include "base/rank_names.h"
#include "base/shared_segment.h"
#include "collectives/called_as.h"
#include "collectives/groups_watch.h"
#include "collectives/machine_memory.h"
#include "collectives/single/single_backend.h"
#include "collectives/unfinished.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

std::atomic<bool> has_told{false};

/// `is_told` is false where another error ends the work.
void finish_group(Group::State& group, const Deadline& deadline, bool is_told) noexcept {
  try {
    auto* const engine = dynamic_cast<FinishesPending*>(group.backend.get());
    is_told = is_told && !group.has_thrown && group.membership->told().empty();
    const Deadline until = is_told ? deadline : Deadline(std::chrono::milliseconds(0));
    std::string why = engine == nullptr ? "" : engine->finish(until);
    if (why.empty()) why = group.device_works.finish(until);
    if (why.empty()) why = group.device_calls.problem();
    if (why.empty() || !is_told) return;
    has_told = true;
    tell_unfinished(group.rank, group.world_size, why, group.on_page.names_of_ranks());
  } catch (const std::exception&) {
    // A store or a rank is gone, which the engines report.
  }
}

/// Its engine may outlive it, if operations are pending.
void leave_group(Group::State& group, const Deadline& deadline, bool is_told) noexcept {
  finish_group(group, deadline, is_told);
  if (auto* const engine = dynamic_cast<LeavesWord*>(group.backend.get())) engine->leave_word();
}

/// Deletes the state of a group whose last handle is gone.
void retire(Group::State* group) noexcept {
  // After its Context, all has been done; a child of fork() has no part in the group.
  if (group->membership->is_open() && group->generation == fork_generation())
    leave_group(*group, Deadline(kToFinish), std::uncaught_exceptions() == 0);
  delete group;
}

}  // namespace

Membership::Membership() = default;
Membership::~Membership() = default;

void Membership::add(const std::shared_ptr<Group::State>& group) {
  const MutexLock lock(mutex_);
  std::erase_if(groups_, [](const auto& known) { return known.expired(); });
  groups_.push_back(group);
}

std::vector<std::shared_ptr<Group::State>> Membership::groups() {
  const MutexLock lock(mutex_);
  std::vector<std::shared_ptr<Group::State>> groups;
  for (const auto& known : groups_)
    if (auto group = known.lock()) groups.push_back(std::move(group));
  return groups;
}

void Membership::watch(Group::State& all) {
  if (all.world_size > 1) watch_ = std::make_unique<GroupsWatch>(all);
}

void Membership::interrupt(const std::string& why) {
  // The groups are released before a wait ends, so that their last handle is not here, on a thread that may be theirs.
  std::vector<c10::intrusive_ptr<c10d::Backend>> engines;
  for (const auto& group : groups()) engines.push_back(group->backend);
  for (const auto& engine : engines)
    if (auto* const able = dynamic_cast<Interruptible*>(engine.get())) able->interrupt(why);
}

std::string Membership::told() const { return watch_ == nullptr ? "" : watch_->told(); }

void Membership::finish(std::chrono::milliseconds patience) {
  const Deadline deadline(patience);
  for (const auto& group : groups()) finish_group(*group, deadline, patience.count() > 0);
}

void Membership::close() {
  open_ = false;
  // A child of fork() does not own the groups, and another thread may have held the mutex at the fork.
  if (fork_generation_ != fork_generation()) return;
  if (watch_ != nullptr) watch_->stop();
  const MutexLock lock(mutex_);
  for (const auto& known : groups_) {
    const auto group = known.lock();
    if (group != nullptr)
      if (auto* engine = dynamic_cast<LeavesWord*>(group->backend.get())) engine->leave_word();
    // Only our own engine is known not to cut off a rank that is still reading data from this one.
    if (group == nullptr || group->blocking == nullptr) continue;
    try {
      group->backend->shutdown();
    } catch (const std::exception&) {
      // The others will notice this rank's end anyway.
    }
  }
}

Group make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, EngineFactories factories,
                 PageGroup on_page, std::shared_ptr<Membership> membership) {
  const AdoptsNewThreads adopted;
  auto engine = world_size == 1 ? single_engine::make_backend() : factories.cpu(store, rank, world_size);
  return make_group_over(std::move(engine), store, rank, world_size, std::move(factories), std::move(on_page),
                         std::move(membership));
}

Group make_group_over(c10::intrusive_ptr<c10d::Backend> engine, const c10::intrusive_ptr<c10d::Store>& store, int rank,
                      int world_size, EngineFactories factories, PageGroup on_page,
                      std::shared_ptr<Membership> membership) {
  const std::string name = engine->getBackendName();
  auto* blocking = dynamic_cast<BlockingEngine*>(engine.get());
  const std::shared_ptr<Group::State> state(
      new Group::State{rank, world_size, store, std::move(factories), engine, name, blocking, membership,
                       world_size == 1 ? engine : nullptr},
      retire);
  state->on_page = std::move(on_page);
  membership->add(state);
  return Group(state);
}

void Group::State::check_member(const char* operation) const {
  if (membership->is_open() || generation != fork_generation()) return;  // a child of fork() gets another message
  throw Error(std::string(operation) +
              ": this rank has left the group, because its Context was destroyed; let the Context outlive everything "
              "that uses its groups");
}

void finish_operations(const Group& group, std::chrono::milliseconds patience) {
  state_of(group).membership->finish(patience);
}
bool has_unfinished_operations() { return has_told; }

void close(const Group& group) { group.state_->membership->close(); }

Group::State& state_of(const Group& group) { return *group.state_; }

MachineMemory* machine_memory_of(const Group& group) {
  auto* const engine = dynamic_cast<SharesMemory*>(state_of(group).backend.get());
  return engine != nullptr ? &engine->machine_memory() : nullptr;
}

bool Group::is_open() const { return state_->membership->is_open(); }
int Group::rank() const { return state_->rank; }
int Group::world_size() const { return state_->world_size; }
const std::string& Group::backend() const { return state_->backend_name; }

at::Tensor Group::allocate(int64_t elements, const at::TensorOptions& options) const {
  TORCH_CHECK(elements >= 0, "allocate: a tensor cannot have ", elements, " elements");
  if (options.device().is_cpu() && state_->backend->supportsTensorAlloc(options.device().index()))
    return state_->backend->allocateTensor(static_cast<long>(elements), options);
  return at::empty({elements}, options);
}

namespace {

/// The part of a group with those ranks, which is its subgroup `number`; nullopt if this rank is not one of them.
/// `part` distinguishes the parts of one number, if there are several.
std::optional<Group> make_part(Group::State& whole, int number, const std::vector<int>& ranks,
                               const std::string& part = "") {
  // The engine itself detects this within one group.
  if (whole.membership->watch() != nullptr) whole.membership->watch()->start();
  const auto place = std::find(ranks.begin(), ranks.end(), whole.rank);
  if (place == ranks.end()) return std::nullopt;
  c10::intrusive_ptr<c10d::Store> store;
  const std::string prefix = "subgroup" + std::to_string(number) + part;
  if (whole.store) store = c10::make_intrusive<c10d::PrefixStore>(prefix, whole.store);
  Group group = make_group(store, static_cast<int>(place - ranks.begin()), static_cast<int>(ranks.size()),
                           whole.factories, whole.on_page.part(number, ranks), whole.membership);
  for (const int rank : ranks) state_of(group).ranks_of_all.push_back(whole.number_of_all(rank));
  return group;
}

/// The part with the ranks that passed the same text as this one.
Group part_of_like(Group::State& whole, const std::vector<std::string>& said) {
  const std::string& mine = said[static_cast<size_t>(whole.rank)];
  std::vector<int> ranks;
  for (size_t rank = 0; rank < said.size(); ++rank)
    if (said[rank] == mine) ranks.push_back(static_cast<int>(rank));
  return *make_part(whole, whole.subgroups++, ranks, "." + std::to_string(ranks.front()));
}

/// Ranks with different parts would wait for each other in groups that never form.
void compare_lists(const Group& group, const std::vector<int>& ranks) {
  if (group.world_size() == 1) return;
  std::string list = "{";
  for (const int rank : ranks) list += (list.size() > 1 ? ", " : "") + std::to_string(rank);
  const CalledAsGuard called_as_guard(shm::CalledAs::kSubgroup);
  const std::vector<std::string> lists = group.all_gather_bytes(list += "}");
  if (std::count(lists.begin(), lists.end(), list) == group.world_size()) return;
  std::string said;
  for (auto one = lists.begin(); one != lists.end(); ++one)
    if (std::find(lists.begin(), one, *one) == one)
      said += (said.empty() ? "" : ", ") + ranks_with(lists, *one) + " gave " + *one;
  throw Error("subgroup: the ranks gave different lists: " + said +
              ". No group was made. Every rank of the group must call subgroup() with the same lists, in the same "
              "order, whether it is in the list or not; split() needs no lists");
}

}  // namespace

std::optional<Group> Group::subgroup(const std::vector<int>& ranks) const {
  const CallGuard guard = state_->enter("subgroup");
  TORCH_CHECK(!ranks.empty(), "subgroup: the list of ranks is empty");
  for (const int rank : ranks) {
    check_peer("subgroup", rank);
    TORCH_CHECK(std::count(ranks.begin(), ranks.end(), rank) == 1, "subgroup: rank ", rank, " is in the list twice");
  }
  compare_lists(*this, ranks);
  return make_part(*state_, state_->subgroups++, ranks);
}

Group Group::split(int64_t color) const {
  const CallGuard guard = state_->enter("split");
  std::vector<std::string> colors;
  {
    const CalledAsGuard called_as_guard(shm::CalledAs::kSplit);
    colors = all_gather_bytes(std::to_string(color));
  }
  return part_of_like(*state_, colors);
}

Group Group::on_this_machine() const {
  const CallGuard guard = state_->enter("on_this_machine");
  std::vector<std::string> machines;
  {
    const CalledAsGuard called_as_guard(shm::CalledAs::kOnThisMachine);
    machines = all_gather_bytes(machine_name());
  }
  return part_of_like(*state_, machines);
}

void Group::check_peer(const char* operation, int peer) const {
  TORCH_CHECK(peer >= 0 && peer < world_size(), operation, ": there is no rank ", peer, "; this group has ranks 0 to ",
              world_size() - 1);
}

}  // namespace lockstep
