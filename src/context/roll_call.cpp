#include "context/roll_call.h"

#include <algorithm>
#include <iomanip>
#include <iterator>
#include <map>
#include <sstream>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/clock.h"
#include "base/error.h"
#include "base/machine_name.h"
#include "base/usable_cores.h"
#include "collectives/cause.h"
#include "collectives/shm/backend/c10d_meeting_store.h"
#include "collectives/versions.h"
#include "context/open_store.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

std::string key_of(int rank) { return "present/" + std::to_string(rank); }

/// A rank's message to the others.
struct Introduction {
  Versions versions;
  std::vector<int> cpus;
  std::vector<std::string> settings;  ///< their values
};

std::string introduce(const std::vector<Setting>& settings) {
  std::ostringstream text;
  text << Versions::loaded_here();
  for (int cpu : allowed_cpus()) text << ' ' << cpu;
  for (const Setting& setting : settings) text << ' ' << std::quoted(setting.value);
  return text.str();
}

Introduction introduction_in(const std::string& words) {
  std::istringstream text(words);
  Introduction one;
  text >> one.versions;
  one.cpus.assign(std::istream_iterator<int>(text), std::istream_iterator<int>());
  text.clear();
  for (std::string said; text >> std::quoted(said);) one.settings.push_back(said);
  return one;
}

/// How long rank 0, which may serve the store, stays after an event that makes all ranks throw, so that the others
/// learn of it, too.
constexpr std::chrono::seconds kToFindOut(2);

/// `values` holds, by rank, the announced settings.
void require_same_settings(const World& world, const c10::intrusive_ptr<c10d::Store>& store,
                           const std::vector<Setting>& settings, const std::vector<std::vector<std::string>>& values) {
  for (size_t rank = 1; rank < values.size(); ++rank)
    for (size_t i = 0; i < std::min({settings.size(), values[rank].size(), values[0].size()}); ++i) {
      if (values[rank][i] == values[0][i]) continue;
      say_farewell(world, store, kToFindOut);
      throw Error("ContextOptions::" + settings[i].name + " is " + values[rank][i] + " on rank " +
                  std::to_string(rank) + " and " + values[0][i] + " on rank 0; set it alike on all ranks");
    }
}

/// Rank 0, which may serve the store, gives up last, so that the others still learn which ranks are missing.
std::chrono::milliseconds patience_of(const World& world, std::chrono::milliseconds timeout) {
  return timeout + std::chrono::seconds(world.rank == 0 ? 1 : 0);
}

[[noreturn]] void throw_missing(const World& world, const std::vector<int>& missing,
                                std::chrono::milliseconds timeout) {
  std::string list;
  for (const int rank : missing) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  const std::string found = "after " + std::to_string(timeout.count() / 1000) + " s " +
                            std::to_string(world.world_size - static_cast<int>(missing.size())) + " of " +
                            std::to_string(world.world_size) + " ranks had joined, missing rank " + list;
  // For the launcher; -1 if all have arrived after all.
  own_page().fail(RankFailure::kMissing, missing.empty() ? -1 : missing.front(), found);
  throw Error(found + "; see their output for the reason, or raise LOCKSTEP_JOIN_TIMEOUT_S if they start slowly");
}

[[noreturn]] void throw_could_not_meet(const std::exception& cause) {
  throw Error("the ranks could not meet: " + cause_of(cause));
}

void wait_for_all(const World& world, c10d::Store& store, std::chrono::milliseconds timeout) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < world.world_size; ++rank) keys.push_back(key_of(rank));
  const Deadline deadline(timeout);
  try {
    store.wait(keys, patience_of(world, timeout));
  } catch (const std::exception& cause) {
    if (!deadline.passed()) throw_could_not_meet(cause);
    std::vector<int> missing;
    for (int rank = 0; rank < world.world_size; ++rank)
      if (!store.check({key_of(rank)})) missing.push_back(rank);
    throw_missing(world, missing, timeout);
  }
}

/// Whether a store that broke before the ranks met may have been another program's.
bool may_have_been_anothers(const World& world) {
  return world.rank != 0 && world.source != World::Source::kLauncher && !world.store_is_hosted;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> open_fresh_store(const World& world, std::chrono::milliseconds timeout) {
  if (world.world_size == 1) return {};
  for (const Deadline deadline(timeout);;) {
    const auto store = open_store(world, timeout);
    Generation found;
    try {
      found = shm_engine::agree_on_generation(*store, world.rank, world.world_size, patience_of(world, timeout));
    } catch (const std::exception& cause) {
      // For `sh -c "first; second"` as a rank: rank 0 may still be leaving the first program and serving its store.
      if (!may_have_been_anothers(world) || deadline.passed()) throw_could_not_meet(cause);
      forget_store();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      continue;
    }
    if (!found.missing.empty()) throw_missing(world, found.missing, timeout);
    return c10::make_intrusive<c10d::PrefixStore>(found.prefix, store);
  }
}

RollCall wait_for_all_ranks(const World& world, const c10::intrusive_ptr<c10d::Store>& store,
                            std::chrono::milliseconds timeout, const std::vector<Setting>& settings) {
  std::vector<std::vector<int>> masks;
  std::map<std::string, int> machines;
  RollCall result;
  const std::string here = machine_name();
  if (store) {
    store->set(key_of(world.rank), introduce(settings));
    wait_for_all(world, *store, timeout);
  }
  std::vector<Versions> versions;
  std::vector<std::vector<std::string>> values;
  for (int rank = 0; rank < world.world_size; ++rank) {
    Introduction one = introduction_in(store ? store->get_to_str(key_of(rank)) : introduce(settings));
    const std::string& machine = one.versions.machine;
    result.most_on_a_machine = std::max(result.most_on_a_machine, ++machines[machine]);
    if (machine == here) {
      if (rank == world.rank) result.local_rank = static_cast<int>(masks.size());
      masks.push_back(std::move(one.cpus));
    }
    versions.push_back(std::move(one.versions));
    values.push_back(std::move(one.settings));
  }
  require_same_versions(versions, [&] { say_farewell(world, store, kToFindOut); });
  require_same_settings(world, store, settings, values);
  warn_of_other_processors(versions, world.rank);
  result.machines = static_cast<int>(machines.size());
  result.threads = threads_per_rank(masks, result.local_rank, cgroup_cpu_quota());
  // The launcher's numbers take precedence: two torchrun agents on one machine count as two.
  result.local_rank = world.local_rank.value_or(result.local_rank);
  result.local_world_size = world.local_world_size.value_or(static_cast<int>(masks.size()));
  return result;
}

void say_farewell(const World& world, const c10::intrusive_ptr<c10d::Store>& store,
                  std::chrono::milliseconds timeout) noexcept {
  try {
    if (store->add("farewells", 1) == world.world_size) store->set("all_left", std::string("1"));
    store->wait({"all_left"}, timeout);
    // The rank that serves the store leaves last, so that no other rank loses it.
    if (store->add("gone", 1) == world.world_size) store->set("all_gone", std::string("1"));
    if (world.rank == 0) store->wait({"all_gone"}, timeout);
  } catch (const std::exception&) {
    // A peer has ended without saying so, or needs longer; this rank's work is done anyway.
  }
}

}  // namespace lockstep
