#include "context/open_store.h"

#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/error.h"
#include "base/mutex.h"
#include "collectives/ancestor.h"
#include "collectives/cause.h"
#include "collectives/key_value_store.h"
#include "collectives/tcp.h"
#include "rank_page/rank_board.h"
#include "rendezvous/local_rendezvous.h"

namespace lockstep {
namespace {

using StorePointer = c10::intrusive_ptr<c10d::Store>;

StorePointer open_tcp(const World& world, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(world.master_port);
  options.timeout = timeout;
  options.isServer = world.rank == 0 && !world.store_is_hosted;
  options.waitWorkers = false;
  FileDescriptor listener;
  if (options.isServer) {
    // The socket that the store makes by itself would listen on every interface.
    listener = listen_tcp(world.master_addr, world.master_port);
    options.masterListenFd = listener.get();
  }
  try {
    // The store's own wait prints a stack trace for each failed attempt.
    if (!options.isServer) await_listener(world.master_addr, world.master_port, Deadline(timeout));
    StorePointer store = c10::make_intrusive<c10d::TCPStore>(world.master_addr, options);
    listener.release();  // now owned by the server
    return c10::make_intrusive<c10d::PrefixStore>("lockstep/" + world.job, std::move(store));
  } catch (const std::exception& cause) {
    throw Error("rank " + std::to_string(world.rank) + " cannot reach " +
                (world.store_is_hosted ? "torchrun's store" : "rank 0") + " at MASTER_ADDR=" + world.master_addr +
                " MASTER_PORT=" + std::to_string(world.master_port) + " within " +
                std::to_string(timeout.count() / 1000) + " s: " + cause_of(cause) +
                "; see the output of rank 0 for the reason, or raise LOCKSTEP_JOIN_TIMEOUT_S if it starts slowly");
  }
}

StorePointer open_on_this_machine(const World& world, std::chrono::milliseconds timeout) {
  auto rendezvous = rendezvous_on_this_machine(starting_process(world.rank_variable), world.rank, Deadline(timeout));
  return c10::make_intrusive<KeyValueStore>(std::move(rendezvous.server), std::move(rendezvous.socket), timeout);
}

StorePointer open_new(const World& world, std::chrono::milliseconds timeout) {
  if (world.source == World::Source::kLauncher)
    return c10::make_intrusive<KeyValueStore>(nullptr, inherited_store_socket(*world.store_fd), timeout);
  try {
    return world.master_addr.empty() ? open_on_this_machine(world, timeout) : open_tcp(world, timeout);
  } catch (const Error& error) {
    if (world.rank != 0) own_page().fail(RankFailure::kMissing, 0, error.what());
    throw;
  }
}

/// The store that this process has opened. It outlives the Context: the launcher's socket exists only once, and a rank
/// that makes its next Context early would connect to the last one's server, which is about to end.
class KeptStore {
 public:
  ~KeptStore() {
    if (::getpid() != process_) store_.release();  // a forked child has no thread that serves it
  }

  StorePointer open(const World& world, std::chrono::milliseconds timeout) {
    const MutexLock lock(mutex_);
    if (store_ && ::getpid() != process_)
      throw Error("this process was forked from rank " + std::to_string(world_.rank) +
                  ", whose connection to the other ranks it cannot share; make the Context in the rank itself");
    if (!store_ || world_ != world) {
      store_ = open_new(world, timeout);
      world_ = world;
      process_ = ::getpid();
    }
    store_->setTimeout(timeout);
    return store_;
  }

  void forget() {
    const MutexLock lock(mutex_);
    store_.reset();
  }

 private:
  Mutex mutex_;
  StorePointer store_ LOCKSTEP_GUARDED_BY(mutex_);
  World world_ LOCKSTEP_GUARDED_BY(mutex_);
  pid_t process_ LOCKSTEP_GUARDED_BY(mutex_) = ::getpid();
};

KeptStore& kept_store() {
  static KeptStore kept;
  return kept;
}

}  // namespace

StorePointer open_store(const World& world, std::chrono::milliseconds timeout) {
  return world.world_size == 1 ? StorePointer() : kept_store().open(world, timeout);
}

void forget_store() { kept_store().forget(); }

std::string local_address(const World& world) {
  if (world.one_machine()) return "127.0.0.1";
  if (!world.address.empty()) return world.address;
  return address_towards(world.master_addr, world.master_port);
}

}  // namespace lockstep
