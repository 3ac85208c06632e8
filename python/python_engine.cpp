#include "python_engine.h"

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/environment.h"
#include "base/error.h"
#include "base/machine_name.h"
#include "collectives/hierarchical/hierarchical_backend.h"
#include "collectives/shm/backend/c10d_meeting_store.h"
#include "collectives/shm/backend/make_backend.h"
#include "collectives/shm/backend/request_backend.h"
#include "collectives/tcp.h"
#include "collectives/versions.h"

namespace lockstep::python {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;

/// Whether the ranks of the group are on several machines, which must have the same versions installed. Ranks that met
/// without MASTER_ADDR are on one machine: they need not ask each other, and if they are not, their hosts' names are in
/// the error.
bool on_several_machines(const Store& store, int rank, int world_size, std::chrono::milliseconds timeout) {
  if (world_size == 1 || !Environment::from_process().master_addr) return false;
  const Versions own = Versions::loaded_here();
  const auto exchange = shm_engine::exchange_over(store, rank, world_size, timeout);
  std::vector<Versions> ranks;
  std::ostringstream own_words;
  own_words << own;
  for (const std::string& words : exchange(own_words.str())) std::istringstream(words) >> ranks.emplace_back();
  require_same_versions(ranks, [&] {
    try {
      exchange("");  // afterwards all know, and rank 0, which may serve the store, may end
    } catch (const Error&) {
      // It has.
    }
  });
  warn_of_other_processors(ranks, rank);
  return std::any_of(ranks.begin(), ranks.end(), [&](const Versions& one) { return one.machine != own.machine; });
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_engine(const Store& store, int rank, int world_size,
                                              std::chrono::milliseconds timeout, EngineUse use) {
  const bool is_backend = use == EngineUse::kBackend;
  if (!on_several_machines(store, rank, world_size, timeout))
    return shm_engine::make_backend(store, rank, world_size, timeout, is_backend ? "lockstep" : "shm", is_backend);
  // torchrun's agent keeps its store when it starts ranks again, and the engine's keys are always the same.
  const auto found = shm_engine::agree_on_generation(*store, rank, world_size, timeout);
  if (!found.missing.empty())
    throw Error("rank " + std::to_string(found.missing.front()) +
                " did not join the new group; see its output for the reason");
  // Also where each rank has a machine to itself: over Gloo alone each would hold a slice of an optimizer's state, and
  // state_dict() would be something that every rank calls.
  constexpr int kAnyPort = 9;  // nothing is sent there
  const std::string master = *Environment::from_process().master_addr;
  return hierarchical_engine::make_backend(
      c10::make_intrusive<c10d::PrefixStore>(found.prefix, store), rank, world_size,
      {machine_name(), address_towards(master, kAnyPort), timeout, timeout, /*for_group=*/false});
}

c10::intrusive_ptr<c10d::Backend> shared_engine(const c10::intrusive_ptr<c10d::Backend>& backend,
                                                std::optional<std::chrono::milliseconds> timeout) {
  if (auto within = shm_engine::share_group_of(*backend, timeout)) return within;
  if (timeout) return hierarchical_engine::share_group_of(*backend, *timeout);
  const bool is_between_machines = dynamic_cast<const shm_engine::RequestBackend*>(backend.get()) != nullptr;
  return is_between_machines ? backend : c10::intrusive_ptr<c10d::Backend>();
}

}  // namespace lockstep::python
