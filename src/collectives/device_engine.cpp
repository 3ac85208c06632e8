#include "collectives/device_engine.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/interruption.h"
#include "base/rank_names.h"
#include "collectives/called_as.h"
#include "collectives/cause.h"
#include "collectives/split_table.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

/// Throws the same Error on all ranks if two of them use one GPU. `gpus`: by rank.
void check_gpus(const std::vector<std::string>& gpus) {
  for (const std::string& gpu : gpus)
    if (!gpu.empty() && std::count(gpus.begin(), gpus.end(), gpu) > 1)
      throw Error(ranks_with(gpus, gpu) + " use the same GPU (" + gpu +
                  "), but NCCL needs a GPU for each rank; start no more ranks than there are GPUs (lockstep run -n "
                  "gpu), or move the tensors to the CPU");
}

}  // namespace

void make_device_engine(const Group& group, const at::Tensor& tensor) {
  Group::State& state = state_of(group);
  c10::intrusive_ptr<c10d::Backend> engine;
  std::string problem;
  try {
    engine =
        state.factories.device(tensor.device().type(), c10::make_intrusive<c10d::PrefixStore>("device", state.store),
                               state.rank, state.world_size);
  } catch (const std::exception& cause) {
    problem = cause_of(cause);
  }
  // Uses the CPU's engine, which also notices a rank that called this operation with a CPU tensor.
  const std::vector<std::string> problems = group.all_gather_bytes(problem);
  const auto found = std::find_if(problems.begin(), problems.end(), [](const auto& text) { return !text.empty(); });
  if (found != problems.end()) throw Error(ranks_with(problems, *found) + ": " + *found);
  if (state.factories.device_name) check_gpus(group.all_gather_bytes(state.factories.device_name(tensor.device())));
  state.membership->keep(engine);
  state.device_backend = std::move(engine);
}

void abort_device_engine(Group::State& group) {
  group.device_works.forget();
  if (group.device_backend) group.device_backend->abort();
}

namespace {

template <typename Body>
auto or_abort(Group::State& group, const Body& body) {
  try {
    return body();
  } catch (const Interruption&) {
    throw;
  } catch (...) {
    abort_device_engine(group);
    throw;
  }
}

}  // namespace

void Group::State::throw_device_failure() {
  const std::string text = device_works.take_failure();
  has_thrown = true;
  own_page().fail(RankFailure::kPeer, -1, text);
  abort_device_engine(*this);
  throw Error(text);
}

void announce_device_call(Group::State& group, const shm::Call& call) {
  if (group.world_size == 1 || (call.count == 0 && call.kind != shm::OperationKind::kAllToAllUneven)) return;
  or_abort(group, [&] { group.device_call = group.device_calls.announce(*group.backend, call, group.sequence); });
  // NCCL may connect ranks at any operation, and waits for a rank that is gone without an end.
  if (group.compares_all_calls()) check_device_call(group, group.device_call);
}

void check_device_call(Group::State& group, uint64_t number) {
  or_abort(group, [&] { group.device_calls.check(number); });
}

void compare_device_splits(Group::State& group, const DeviceSplits& sent, const DeviceSplits& received) {
  if (sent.tensor.is_cpu() || group.world_size == 1) return;
  check_device_call(group, group.device_call);  // tables of other operations would not have that size
  SplitTable table(group.world_size);
  uint64_t* number = table.row(group.rank);
  for (const DeviceSplits* side : {&sent, &received}) {
    const int64_t rows = side->tensor.size(0), row = rows == 0 ? 0 : side->tensor.numel() / rows;
    for (int rank = 0; rank < group.world_size; ++rank)
      *number++ = static_cast<uint64_t>(
          (side->splits.empty() ? rows / group.world_size : side->splits[static_cast<size_t>(rank)]) * row);
  }
  const auto columns = static_cast<int64_t>(table.numbers_in_row());
  at::Tensor all = at::from_blob(table.data(), {group.world_size, columns}, at::kLong), mine = all[group.rank].clone();
  const CalledAsGuard named(shm::CalledAs::kOnDevice);
  group.backend->_allgather_base(all, mine, {})->wait();
  table.check();
}

void release_device_engines(const Group& group) {
  Group::State& state = state_of(group);
  state.device_backend = nullptr;
  state.membership->release_device_engines();
}

}  // namespace lockstep
