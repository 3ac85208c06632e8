#include "communicator.h"

#include <algorithm>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <comms/torchcomms/utils/StoreManager.hpp>
#include <comms/torchcomms/utils/Utils.hpp>

#include "base/version.h"
#include "collectives/engine_interfaces.h"
#include "collectives/shm/backend/handles.h"
#include "collectives/shm/backend/shm_backend.h"
#include "python_engine.h"
#include "rank_page/rank_board.h"

namespace lockstep::torchcomms {
namespace {

/// How long a rank waits for others to read why it refuses, since the store may end with it, or for other threads.
constexpr std::chrono::seconds kForOthers{5};

c10::intrusive_ptr<c10d::Store> within(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

/// A handle of this process, with the rank that a launcher gave it.
std::string own_handle() {
  try {
    return shm_engine::new_handle(comms::query_ranksize().first);
  } catch (const std::exception&) {
    return shm_engine::new_handle(0);  // no launcher
  }
}

}  // namespace

Communicator::~Communicator() {
  try {
    replace(nullptr, State::kFinalized);
  } catch (const std::exception&) {
    // A forked child has no part in the group.
  }
}

void Communicator::init(at::Device device, const std::string& name, const comms::CommOptions& options) {
  if (state_ != State::kNew) refuse("init() was called twice");
  name_ = name;
  if (!device.is_cpu())
    refuse("lockstep serves tensors in the CPU's memory, not on ", device,
           "; make the communicator for device cpu, or take another backend");
  device_ = device;
  options_ = options;
  options_.store = nullptr;
  stores_.given = options.store;
  handle_ = own_handle();
  if (options.enable_reconfigure) {
    state_ = State::kUnformed;
    return;
  }
  const auto [rank, size] = comms::query_ranksize();
  const std::string prefix = "lockstep/" + name + "/";
  if (options.store) {
    // Each rank counts its communicators of this name, so that a name may be used again.
    const int64_t nth = options.store->add(prefix + std::to_string(rank), 1);
    return join(within(options.store, prefix + std::to_string(nth)), rank, size);
  }
  // The first store is at MASTER_PORT, which other communicators need next: none returns before rank 0 has closed it.
  auto first = comms::createPrefixStore(prefix, options.timeout);
  join(comms::dupPrefixStore(prefix, first, options.timeout), rank, size);
  first.reset();
  formed()->barrier(c10d::BarrierOptions())->wait();
}

void Communicator::join(const StorePtr& store, int rank, int size) {
  replace(python::make_engine(store, rank, size, options_.timeout, python::EngineUse::kBackend), State::kFormed);
  stores_.present = store;
}

void Communicator::replace(BackendPtr backend, State state) {
  if (backend) {
    rank_ = backend->getRank();
    size_ = backend->getSize();
  }
  {
    const MutexLock lock(mutex_);
    backend_.swap(backend);
    state_ = state;
    if (state == State::kFormed) failed_ = false;
  }
  if (backend) backend->shutdown();
}

Communicator::BackendPtr Communicator::formed() const {
  const MutexLock lock(mutex_);
  if (state_ == State::kFormed) return backend_;
  if (state_ == State::kAborted) refuse("it was aborted; form it anew by reconfigure(), or make another");
  if (state_ == State::kFinalized) refuse("it was finalized");
  refuse("it has no ranks yet; form it by reconfigure() first");
}

void Communicator::finalize() {
  if (state_ == State::kNew || state_ == State::kFinalized) refuse("finalize() before init(), or twice");
  std::string pending;
  if (state_ == State::kFormed && !failed_)
    if (auto* const finishes = dynamic_cast<FinishesPending*>(formed().get()))
      pending = finishes->finish(Deadline(options_.timeout));
  replace(nullptr, State::kFinalized);
  // A thread that takes Python's lock after the interpreter has begun to end would end the process.
  for (const Deadline deadline(kForOthers); in_hands_.use_count() > 1 && !deadline.passed();)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  stores_ = {};
  if (!pending.empty()) refuse("finalize(): ", pending);
}

std::string_view Communicator::getBackendVersion() const { return library_version(); }

std::shared_ptr<comms::TorchCommBackend> Communicator::split(const std::vector<int>& ranks, const std::string& name,
                                                             const comms::CommOptions& options) {
  formed();
  if (!stores_.present) refuse("split(): its group was formed without a store; give new_comm() one");
  const int64_t nth = stores_.present->add(c10::str("split/", name, "/calls/", rank_), 1);  // this rank's, of this name
  if (ranks.empty()) return nullptr;
  const std::string list = "[" + c10::Join(", ", ranks) + "]";
  const std::set<int> each(ranks.begin(), ranks.end());
  if (each.size() != ranks.size() || *each.begin() < 0 || *each.rbegin() >= size_ || !each.count(rank_))
    refuse("split(): rank ", rank_, " gave ", list, "; a list holds ranks from 0 to ", size_ - 1,
           ", each once, and its caller");
  const StorePtr store = within(stores_.present, c10::str("split/", name, "/", nth));
  store->set(std::to_string(rank_), list);
  std::string unlike;
  for (const int rank : ranks) {
    store->wait({std::to_string(rank)}, options.timeout);
    const std::string theirs = store->get_to_str(std::to_string(rank));
    if (theirs != list) unlike = c10::str(", and rank ", rank, " gave ", theirs);
  }
  store->set(c10::str("read/", rank_), "");
  if (!unlike.empty()) {
    try {
      for (const int rank : ranks) store->wait({c10::str("read/", rank)}, kForOthers);
    } catch (const std::exception&) {
      // A rank that is not in the other's list reads nothing.
    }
    refuse("split(): rank ", rank_, " gave ", list, unlike, "; all ranks of a group give the same list");
  }
  std::shared_ptr<Communicator> part = make_communicator();
  part->name_ = name;
  part->options_ = options;
  part->options_.store = nullptr;
  part->handle_ = own_handle();
  const auto place = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
  part->join(within(store, "of/" + std::to_string(ranks[0])), static_cast<int>(place), static_cast<int>(ranks.size()));
  return part;
}

c10::intrusive_ptr<comms::TorchWork> Communicator::reconfigure(const comms::ReconfigureOptions& options) {
  if (state_ == State::kNew || state_ == State::kFinalized) refuse("reconfigure() before init() or after finalize()");
  if (!uuids_.insert(options.uuid).second)
    refuse("reconfigure(): uuid ", options.uuid, " was used before; give each call a new one");
  std::vector<std::string> handles;
  std::visit([&](const auto& some) { handles.assign(some.begin(), some.end()); }, options.handles);
  // A set has the same order on all ranks only once it is sorted: by the ranks that made the handles.
  if (options.handles.index() == 0) std::sort(handles.begin(), handles.end());
  auto world = shm_engine::form_by_handles(handle_, handles, options.uuid, options.timeout.value_or(options_.timeout));
  own_page().communicates();
  auto group = std::make_shared<shm_engine::BackendState>(std::move(world));
  replace(c10::make_intrusive<shm_engine::ShmBackend>(std::move(group), options_.timeout, "lockstep", true),
          State::kFormed);
  stores_.present = stores_.given;
  if (stores_.given)
    stores_.present = within(stores_.given, c10::str("lockstep/", name_, "/", handles[0], "/", options.uuid));
  return c10::make_intrusive<comms::TorchWorkCompleted>();
}

void Communicator::abort() {
  BackendPtr backend;
  {
    const MutexLock lock(mutex_);
    if (state_ != State::kFormed) return;
    state_ = State::kAborted;
    backend = backend_;
  }
  note_failure();
  backend->abort();
}

void Communicator::note_failure() {
  if (!failed_.exchange(true)) runAbortHooks();
}

void Communicator::rethrow(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::DistBackendError&) {
    note_failure();
  } catch (const Error&) {
    note_failure();
  } catch (...) {
    // Arguments that are wrong: nothing was started.
  }
  std::rethrow_exception(plain(error));
}

c10::intrusive_ptr<comms::TorchWork> Communicator::in_progress(EngineWork::Works works, milliseconds timeout) {
  auto work = c10::make_intrusive<EngineWork>(std::move(works), timeout, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->note_failure();
  });
  settle_later({in_hands_, work});
  return work;
}

}  // namespace lockstep::torchcomms
