#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "base/error.h"
#include "base/interruption.h"
#include "collectives/called_as.h"
#include "collectives/shm/backend/page_notes.h"
#include "collectives/shm/backend/shm_backend.h"
#include "collectives/shm/kernels/reduce.h"

// Operations without a Work: Group's, and those where Python wants only the result. They need no allocation, no wrapper
// for Python, and no second call that waits.

namespace lockstep::shm_engine {

void ShmBackend::run(shm::Request&& request) {
  // Operations begin one after the other, so the number needs no locked instruction.
  sequence_.store(sequence_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  request.called_as = called_as;
  try {
    state().core().run(std::move(request), timeout_.load());
  } catch (const Interruption&) {
    state().note_told();
    throw;
  }
}

bool ShmBackend::is_immediate(const TensorRequest& request) {
  // The profiler wants a Work, and an operation that is refused must not appear on the page.
  if (!request.waits || request.parts.size() != 1 || at::hasCallbacks()) return false;
  const shm::Request& part = request.parts.front();
  if (part.root < 0 || part.root >= getSize()) return false;
  if (shm::is_reduction(part.kind) && shm::find_reduce(part.type, part.op, getSize()) == nullptr) return false;
  const MutexLock lock(mutex_);
  return !coalescing_;
}

void ShmBackend::finish_now(TensorRequest request) {
  const uint64_t sequence = ++sequence_;
  const auto timeout = bounded(request.timeout);
  const std::optional<PageNote> shown = page_note(request, sequence);
  if (shown) note_start(&request, request.title, request.inputs, sequence, shown->group);
  try {
    std::optional<WaitOnPage> waiting;
    if (shown) waiting.emplace(shown->group, shown->within(timeout));
    state().core().run(std::move(request.parts.front()), timeout);
  } catch (const Interruption&) {
    state().note_told();
    if (shown) note_end(&request, sequence, /*failed=*/true);
    throw;
  } catch (const Error& error) {
    state().note_told();
    if (shown) note_end(&request, sequence, /*failed=*/true);
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  at::NoGradGuard no_grad;
  for (const auto& step : request.finish) step();
  if (shown) note_end(&request, sequence, /*failed=*/false);
}

}  // namespace lockstep::shm_engine
