#include "context/roll_call.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <sstream>
#include <thread>

#include <caffe2/core/common.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/version.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/machine_name.h"
#include "base/usable_cores.h"
#include "base/version.h"
#include "collectives/cause.h"
#include "collectives/open_store.h"
#include "collectives/shm/backend/generation.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

std::string key_of(int rank) { return "present/" + std::to_string(rank); }

/// Of the LibTorch that is loaded, which may be another than the one that this was compiled against. at::show_config()
/// says it too, and takes 0.4 ms.
std::string libtorch_version() {
  const auto& options = caffe2::GetBuildOptions();
  const auto found = options.find("TORCH_VERSION");
  return found == options.end() || found->second.empty() ? TORCH_VERSION : found->second;
}

/// What a rank tells the others.
struct Introduction {
  std::string machine;
  std::string lockstep, libtorch;  // their versions
  std::vector<int> cpus;
};

std::string introduce() {
  std::ostringstream text;
  text << machine_name() << ' ' << library_version() << ' ' << libtorch_version();
  for (int cpu : allowed_cpus()) text << ' ' << cpu;
  return text.str();
}

Introduction introduction_in(const std::string& words) {
  std::istringstream text(words);
  Introduction one;
  text >> one.machine >> one.lockstep >> one.libtorch;
  one.cpus.assign(std::istream_iterator<int>(text), std::istream_iterator<int>());
  return one;
}

/// Rank 0, which may serve the store, gives up last, so that the others still learn who is missing.
std::chrono::milliseconds patience_of(const World& world, std::chrono::milliseconds timeout) {
  return timeout + std::chrono::seconds(world.rank == 0 ? 1 : 0);
}

[[noreturn]] void throw_missing(const World& world, const std::vector<int>& missing,
                                std::chrono::milliseconds timeout) {
  std::string list;
  for (const int rank : missing) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  const std::string found = "after " + std::to_string(timeout.count() / 1000) + " s " +
                            std::to_string(world.world_size - static_cast<int>(missing.size())) + " of " +
                            std::to_string(world.world_size) + " ranks are there, missing " + list;
  // For the launcher; -1 if they have all arrived after all.
  own_page().fail(RankFailure::kMissing, missing.empty() ? -1 : missing.front(), found);
  throw Error(found + "; see their output for why, or raise LOCKSTEP_JOIN_TIMEOUT_S if they start slowly");
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

/// How `one`, of `rank`, differs from rank 0; empty: it does not.
std::string other_version(int rank, const Introduction& one, const Introduction& first) {
  const bool lockstep = one.lockstep != first.lockstep;
  if (!lockstep && one.libtorch == first.libtorch) return "";
  const auto has = [&](const Introduction& of) {
    const std::string given = of.machine.substr(of.machine.rfind('/') + 1);  // LOCKSTEP_MACHINE
    const std::string machine = given.empty() ? of.machine.substr(0, of.machine.find('/')) : given;
    return " on " + machine + " has " + (lockstep ? "Lockstep " + of.lockstep : "LibTorch " + of.libtorch);
  };
  return "rank " + std::to_string(rank) + has(one) + ", and rank 0" + has(first);
}

/// For rank 0, which may serve the store, after what makes all ranks throw: so long for the others to find it too.
constexpr std::chrono::seconds kToFindOut(2);

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
      // `sh -c "first; second"` as a rank: rank 0 may still be leaving the first program and serving its store.
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
                            std::chrono::milliseconds timeout) {
  std::vector<std::vector<int>> masks;
  std::map<std::string, int> machines;
  RollCall result;
  const std::string here = machine_name();
  std::optional<Introduction> first;
  if (store) {
    store->set(key_of(world.rank), introduce());
    wait_for_all(world, *store, timeout);
  }
  for (int rank = 0; rank < world.world_size; ++rank) {
    Introduction one = introduction_in(store ? store->get_to_str(key_of(rank)) : introduce());
    if (!first) first = one;
    if (const std::string found = other_version(rank, one, *first); !found.empty()) {
      // All compare all with rank 0, so all throw alike.
      say_farewell(world, store, kToFindOut);
      note_error(RankFailure::kMissing, rank, found);  // for the launcher: that rank does not join the others
      throw Error(found + "; install the same version on all machines");
    }
    result.most_on_a_machine = std::max(result.most_on_a_machine, ++machines[one.machine]);
    if (one.machine != here) continue;
    if (rank == world.rank) result.local_rank = static_cast<int>(masks.size());
    masks.push_back(std::move(one.cpus));
  }
  result.machines = static_cast<int>(machines.size());
  result.threads = threads_per_rank(masks, result.local_rank, cgroup_cpu_quota());
  // The launcher's numbers win: two torchrun agents on one machine count as two.
  result.local_rank = world.local_rank.value_or(result.local_rank);
  result.local_world_size = world.local_world_size.value_or(static_cast<int>(masks.size()));
  return result;
}

void say_farewell(const World& world, const c10::intrusive_ptr<c10d::Store>& store,
                  std::chrono::milliseconds timeout) noexcept {
  try {
    if (store->add("farewells", 1) == world.world_size) store->set("all_left", std::string("1"));
    store->wait({"all_left"}, timeout);
    // The rank that serves the store leaves last, so that no other rank finds it gone.
    if (store->add("gone", 1) == world.world_size) store->set("all_gone", std::string("1"));
    if (world.rank == 0) store->wait({"all_gone"}, timeout);
  } catch (const std::exception&) {
    // A peer has ended without saying so, or needs longer; this rank's work is done in any case.
  }
}

}  // namespace lockstep
