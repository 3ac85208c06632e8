#include "collectives/device_calls.h"

#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/interruption.h"
#include "base/rank_names.h"
#include "collectives/called_as.h"
#include "collectives/cause.h"

namespace lockstep {
namespace {

constexpr int64_t kWords = 6;

/// Without the count of an operation whose counts may differ by rank.
at::Tensor packed(const shm::Call& call) {
  const bool counts = call.kind != shm::OperationKind::kAllToAllUneven;
  return at::tensor({static_cast<int64_t>(call.kind), static_cast<int64_t>(call.type), static_cast<int64_t>(call.op),
                     static_cast<int64_t>(call.called_as), static_cast<int64_t>(call.root),
                     counts ? static_cast<int64_t>(call.count) : 0},
                    at::kLong);
}
shm::Call unpacked(const int64_t* words) {
  return {static_cast<shm::OperationKind>(words[0]),
          static_cast<shm::DataType>(words[1]),
          static_cast<shm::ReduceOp>(words[2]),
          static_cast<shm::CalledAs>(words[3]),
          static_cast<int>(words[4]),
          static_cast<size_t>(words[5])};
}

/// What is wrong if the ranks' calls differ; empty: nothing.
std::string mismatch(const at::Tensor& calls, uint64_t sequence) {
  std::vector<std::string> texts;
  bool differ = false;
  for (int64_t rank = 0; rank < calls.size(0); ++rank) {
    texts.push_back(unpacked(calls[rank].const_data_ptr<int64_t>()).text());
    differ = differ || !calls[rank].equal(calls[0]);
  }
  if (!differ) return "";
  return "ranks disagree on operation " + std::to_string(sequence) +
         ", on tensors on a device: " + ranks_of_each(texts, "called ") +
         ". All ranks must call the same operations in the same order.";
}

}  // namespace

uint64_t DeviceCalls::announce(c10d::Backend& cpu, const shm::Call& call, uint64_t sequence) {
  const MutexLock lock(mutex_);
  compare_arrived();
  throw_problem();
  at::Tensor mine = packed(call), all = at::empty({cpu.getSize(), kWords}, at::kLong);
  const CalledAsGuard named(shm::CalledAs::kOnDevice);
  auto gathered = cpu._allgather_base(all, mine, {});
  pending_.push_back({++announced_, sequence, std::move(all), std::move(gathered)});
  return announced_;
}

void DeviceCalls::check(uint64_t number) {
  const MutexLock lock(mutex_);
  while (problem_.empty() && !pending_.empty() && pending_.front().number <= number) compare_front();
  throw_problem();
}

std::string DeviceCalls::problem() {
  const MutexLock lock(mutex_);
  compare_arrived();
  return problem_;
}

bool DeviceCalls::has_arrived(uint64_t number) {
  const MutexLock lock(mutex_);
  compare_arrived();
  return !problem_.empty() || pending_.empty() || pending_.front().number > number;
}

void DeviceCalls::compare_front() {
  Announced front = std::move(pending_.front());
  pending_.pop_front();
  try {
    front.gathered->wait();
    problem_ = mismatch(front.calls, front.sequence);
  } catch (const Interruption&) {
    pending_.push_front(std::move(front));
    throw;
  } catch (const std::exception& cause) {
    problem_ = cause_of(cause);
  }
}

void DeviceCalls::compare_arrived() {
  while (problem_.empty() && !pending_.empty() && pending_.front().gathered->isCompleted()) compare_front();
}

void DeviceCalls::throw_problem() const {
  if (!problem_.empty()) throw Error(problem_);
}

}  // namespace lockstep
