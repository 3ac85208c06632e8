#include "c/meet.h"

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/hash.h"
#include "base/mutex.h"
#include "c/guarded.h"
#include "collectives/ancestor.h"
#include "collectives/shm/segment/bootstrap.h"
#include "rendezvous/client_store.h"
#include "rendezvous/local_rendezvous.h"
#include "rendezvous/text_exchange.h"

namespace lockstep::c {
namespace {

using StorePointer = std::shared_ptr<ClientStore>;

/// The launcher's socket exists only once, so the connection is kept for the next lockstep_join() of this process.
StorePointer launchers_store(int fd) {
  static Mutex mutex;
  static StorePointer& kept = *new StorePointer;  // never destroyed: another thread may be joining at exit
  const MutexLock lock(mutex);
  if (!kept) kept = std::make_shared<ClientStore>(nullptr, inherited_store_socket(fd));
  return kept;
}

/// A text that is equal for the ranks of one start, and for no others on this machine.
std::string job_of(const World& world, const Environment& environment) {
  if (world.source != World::Source::kTorchrun) return starting_process(world.rank_variable);
  Hash hash;
  hash.add(world.master_addr);
  hash.add(std::to_string(world.master_port));
  hash.add(world.job);
  hash.add(environment.torchelastic_restart_count.value_or(""));
  return "torchrun-" + hash.digits();
}

StorePointer open_store(const World& world, const Environment& environment, const Deadline& deadline) {
  if (world.source == World::Source::kLauncher) return launchers_store(*world.store_fd);
  auto rendezvous = rendezvous_on_this_machine(job_of(world, environment), world.rank, deadline);
  return std::make_shared<ClientStore>(std::move(rendezvous.server), std::move(rendezvous.socket));
}

/// `met` is set once all ranks have found each other.
shm::World form(const World& world, const StorePointer& store, std::chrono::milliseconds timeout, bool& met) {
  shm::BootstrapOptions options;
  options.timeout = std::min(timeout, options.timeout);
  const TextExchange exchange = exchange_texts(store, world.rank, world.world_size, timeout);
  const auto noted = [&](const std::string& mine) {
    auto texts = exchange(mine);
    met = true;
    return texts;
  };
  return shm::bootstrap(world.rank, world.world_size, noted, options);
}

/// Rank 0, which may serve the store, gives up last, so that the others still learn which ranks are missing.
std::chrono::milliseconds patience_of(const World& world, std::chrono::milliseconds timeout) {
  return timeout + std::chrono::seconds(world.rank == 0 ? 1 : 0);
}

}  // namespace

World discover_world_of_one_machine(const Environment& environment) {
  Environment here = environment;
  // For ranks on one machine the kernel's names suffice, so MPI and Slurm need no address. If variables were set by
  // hand, the address distinguishes jobs.
  if (!here.rank && !here.world_size && !here.master_addr) {
    here.master_addr = "localhost";
    here.master_port = "1";
  }
  World world = discover_world(here);
  const bool unknown = world.source == World::Source::kTorchrun && !world.local_world_size;
  if (!world.one_machine() && !unknown)
    throw StatusError(LOCKSTEP_SEVERAL_MACHINES,
                      std::string(name_of(world.source)) + " started " + std::to_string(world.world_size) +
                          " ranks, and only " +
                          (world.local_world_size ? std::to_string(*world.local_world_size) : "some") +
                          " of them on the machine of rank " + std::to_string(world.rank) +
                          "; liblockstep_c works on one machine: start all ranks there, or use the C++ library, which "
                          "works on several");
  if (world.world_size > shm::kMaxRanks)
    throw StatusError(LOCKSTEP_JOIN_FAILED, std::to_string(world.world_size) +
                                                " ranks on one machine are more than liblockstep_c can join, at most " +
                                                std::to_string(shm::kMaxRanks) + "; start fewer");
  return world;
}

Meeting meet(const World& world, const Environment& environment, std::chrono::milliseconds timeout) {
  if (world.world_size == 1)
    return {shm::bootstrap(0, 1, [](const std::string& mine) { return std::vector{mine}; }), nullptr};
  for (const Deadline deadline(timeout);;) {
    const StorePointer store = open_store(world, environment, deadline);
    bool met = false;
    try {
      return {form(world, store, patience_of(world, timeout), met), store};
    } catch (const Error&) {
      // Rank 0 may have been leaving an earlier meeting, whose store this rank has found.
      const bool too_early = !met && !store->is_there() && world.rank != 0 && world.source != World::Source::kLauncher;
      if (!too_early || deadline.passed()) {
        store->leave(world.world_size);  // the others may still have to read why there is no group
        throw;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace lockstep::c
