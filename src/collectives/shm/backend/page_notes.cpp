#include "collectives/shm/backend/page_notes.h"

#include <atomic>
#include <cstring>

#include "base/clock.h"
#include "collectives/core_types.h"
#include "collectives/start_collective.h"
#include "rank_page/rank_board.h"

namespace lockstep::shm_engine {
namespace {

constexpr uint64_t kNoSequence = 0;  // no operation has it

/// The operation that this rank's page shows: the last one that began. It may no longer exist.
std::atomic<const void*> shown{nullptr};

}  // namespace

void note_start(const void* operation, const char* title, const std::vector<at::Tensor>& inputs, uint64_t sequence,
                int group) {
  shown.store(operation, std::memory_order_relaxed);
  const char* colon = std::strchr(title, ':');
  const char* kind = colon == nullptr ? title : colon + 1;
  if (inputs.empty() || !inputs.front().defined())
    return own_page().start_operation(sequence, kind, "", 0, nullptr, 0, coarse_now(), "", group);
  const at::Tensor& first = inputs.front();
  own_page().start_operation(sequence, kind, dtype_name(first.scalar_type()), first.numel(), first.sizes().data(),
                             first.sizes().size(), coarse_now(), "", group);
}

void note_end(const void* operation, uint64_t sequence, bool failed) {
  own_page().set_waits_for(0);  // a thread that still waits announces it again
  if (!failed) own_page().finish_operation(shown.load(std::memory_order_relaxed) == operation ? sequence : kNoSequence);
}

PageNote PageNote::of(PageGroup& group, int rank, uint64_t sequence, const shm::Request* collective,
                      std::chrono::milliseconds timeout) {
  PageNote note{.group = group.place()};
  if (collective == nullptr) return note;
  note.awaited = start_collective(group, rank, sequence, *collective, /*compares_all=*/true);
  if (timeout < kShortest) note.awaited.needs = 0;
  return note;
}

RankStatus::Awaited PageNote::within(std::chrono::milliseconds timeout) const {
  RankStatus::Awaited what = awaited;
  if (timeout < kShortest) what.needs = 0;
  return what;
}

}  // namespace lockstep::shm_engine
