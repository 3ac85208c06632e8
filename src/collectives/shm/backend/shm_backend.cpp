#include "collectives/shm/backend/shm_backend.h"

#include <ATen/ATen.h>

#include "base/clock.h"
#include "collectives/shm/backend/c10d_meeting_store.h"
#include "collectives/shm/backend/make_backend.h"
#include "collectives/unfinished.h"
#include "rank_page/rank_board.h"

namespace lockstep::shm_engine {
namespace {

struct BackendOptions final : c10d::Backend::Options {
  using Options::Options;
};

/// The operations between startCoalescing and endCoalescing as one Work.
class CoalescedWork final : public c10d::Work {
 public:
  explicit CoalescedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    for (const auto& work : works_)
      if (!work->isCompleted()) return false;
    return true;
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& work : works_) work->wait(timeout);
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const auto& work : works_) futures.push_back(work->getFuture());
    return c10::collectAll(futures);
  }

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                               std::chrono::milliseconds timeout, const std::string& name,
                                               bool writes_page,
                                               std::optional<std::chrono::milliseconds> join_timeout) {
  timeout = std::min(timeout, kLongestTimeout);
  const auto join = std::min(join_timeout.value_or(timeout), kLongestTimeout);
  shm::BootstrapOptions options;
  options.timeout = std::min(join, options.timeout);
  auto world = shm::bootstrap(rank, world_size, exchange_over(store, rank, world_size, join), options);
  if (writes_page) own_page().communicates();
  return c10::make_intrusive<ShmBackend>(std::make_shared<BackendState>(std::move(world)), timeout, name, writes_page);
}

c10::intrusive_ptr<c10d::Backend> make_unformed_backend(int rank, int world_size, std::chrono::milliseconds timeout,
                                                        const std::string& name) {
  return c10::make_intrusive<ShmBackend>(rank, world_size, std::min(timeout, kLongestTimeout), name,
                                         /*writes_page=*/true);
}

c10::intrusive_ptr<c10d::Backend> share_group_of(c10d::Backend& backend,
                                                 std::optional<std::chrono::milliseconds> timeout) {
  auto* const own = dynamic_cast<ShmBackend*>(&backend);
  if (own == nullptr) return {};
  return c10::make_intrusive<ShmBackend>(
      own->shared(), std::min(timeout.value_or(own->getBackendOptions()->timeout), kLongestTimeout), "shm");
}

ShmBackend::ShmBackend(BackendStatePtr shared, std::chrono::milliseconds timeout, std::string name, bool writes_page)
    : Regroups(shared->core().rank(), shared->core().size()),
      BlockingEngine(/*compares_all_calls=*/true),
      shared_(std::move(shared)),
      name_(std::move(name)),
      writes_page_(writes_page),
      timeout_(timeout) {
  // Python's programs, whose operations this object shows, may call a group from any thread.
  if (writes_page_) state().core().with_waiter([](shm::Waiter& waiter) { waiter.expect_several_callers(); });
}

ShmBackend::ShmBackend(int rank, int size, std::chrono::milliseconds timeout, std::string name, bool writes_page)
    : Regroups(rank, size),
      BlockingEngine(/*compares_all_calls=*/true),
      name_(std::move(name)),
      writes_page_(writes_page),
      timeout_(timeout) {}

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<BackendOptions>(name_, timeout_.load());
}

std::chrono::milliseconds ShmBackend::bounded(std::chrono::milliseconds timeout) const {
  return std::min(timeout == c10d::kUnsetTimeout || timeout == kNoTimeout ? timeout_.load() : timeout, kLongestTimeout);
}

ShmBackend::WorkPtr ShmBackend::launch(TensorRequest request) {
  state().free_released();
  if (is_immediate(request)) {
    finish_now(std::move(request));
    return {};
  }
  std::vector<shm::WorkPtr> works;
  auto keep_alive = request.tensors.empty() ? nullptr : state().keep(std::move(request.tensors));
  for (auto& part : request.parts) {
    part.keep_alive = keep_alive;
    works.push_back(state().core().start(std::move(part)));
  }
  return launch(std::move(request), std::move(works));
}

ShmBackend::WorkPtr ShmBackend::launch(TensorRequest request, std::vector<shm::WorkPtr> works) {
  const bool waits = request.waits;
  const auto timeout = bounded(request.timeout);
  const uint64_t sequence = ++sequence_;
  const std::optional<PageNote> shown = page_note(request, sequence);
  WorkPtr work = c10::make_intrusive<ShmWork>(shared(), std::move(request), std::move(works), timeout, sequence, shown);
  {
    const MutexLock lock(mutex_);
    if (coalescing_) {
      coalescing_->push_back(work);
      return work;
    }
  }
  if (!waits) return work;
  work->wait();
  return {};
}

std::optional<PageNote> ShmBackend::page_note(const TensorRequest& request, uint64_t sequence) {
  if (!writes_page_) return std::nullopt;
  const shm::Request* collective = request.parts.empty() ? nullptr : &request.parts.front();
  return PageNote::of(on_page_, getRank(), sequence, collective, bounded(request.timeout));
}

void ShmBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  show_group();
}

void ShmBackend::show_group() {
  if (!writes_page_ || !shared_) return;
  const std::string& uid = getGroupUid();
  std::vector<int> ranks;
  for (int rank = 0; rank < getSize(); ++rank) ranks.push_back(state().core().world().numbers().launched_rank(rank));
  const RankBoard* board = launchers_board();
  if (board == nullptr || std::count(ranks.begin(), ranks.end(), -1) > 0) return;
  const bool is_all = uid == "0" && ranks.size() == static_cast<size_t>(board->world_size());
  on_page_ = PageGroup(is_all ? "" : "process group " + uid, ranks);
}

void ShmBackend::startCoalescing() {
  const MutexLock lock(mutex_);
  TORCH_CHECK(!coalescing_, "startCoalescing was called twice without endCoalescing in between");
  coalescing_.emplace();
}

ShmBackend::WorkPtr ShmBackend::endCoalescing() {
  const MutexLock lock(mutex_);
  TORCH_CHECK(coalescing_, "endCoalescing without startCoalescing");
  return c10::make_intrusive<CoalescedWork>(*std::exchange(coalescing_, std::nullopt));
}

at::Tensor ShmBackend::allocateTensor(long elements, at::TensorOptions options) {
  TORCH_CHECK_VALUE(elements >= 0, "allocateTensor: ", elements, " elements");
  TORCH_CHECK_VALUE(options.device().is_cpu(), "allocateTensor: shared memory holds CPU tensors only");
  const size_t bytes = static_cast<size_t>(elements) * options.dtype().itemsize();
  // Keeps only the memory alive, not the group: pending operations keep tensors, which would keep the group.
  struct Lease {
    std::shared_ptr<shm::Arena> arena;
    void* memory;
    ~Lease() { arena->free(memory); }
  };
  auto* lease = new Lease{state().core().arena(), state().core().allocate(bytes)};
  at::DataPtr data(
      lease->memory, lease, [](void* context) { delete static_cast<Lease*>(context); }, at::kCPU);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}, options).set_(at::Storage(std::move(storage)), 0, {elements}, {1});
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<Options>& options) {
  const auto place = std::find(ranks.begin(), ranks.end(), getRank());
  if (place == ranks.end()) return nullptr;
  return make_backend(store, static_cast<int>(place - ranks.begin()), static_cast<int>(ranks.size()),
                      options ? options->timeout : timeout_.load(), name_, writes_page_);
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const c10::intrusive_ptr<Options>& options, const int& rank,
                                                    const int& size) {
  return make_backend(store, rank, size, options ? options->timeout : timeout_.load(), name_, writes_page_);
}

void ShmBackend::shutdown() {
  if (!shared_) return;
  const std::string why = finish(Deadline(kToFinish));
  if (!why.empty()) tell_unfinished(getRank(), getSize(), why);
  shared_->core().leave();
}

void ShmBackend::abort() { interrupt("abort() was called on the group"); }

void end_futures(std::chrono::milliseconds at_most) { FutureThread::end_all(at_most); }

}  // namespace lockstep::shm_engine
