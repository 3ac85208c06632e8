#include "collectives/hierarchical/machine.h"

#include <algorithm>
#include <bit>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "collectives/shm/backend/c10d_meeting_store.h"
#include "collectives/shm/segment/bootstrap.h"

namespace lockstep::hierarchical_engine {

std::byte* Machine::stage(size_t bytes) {
  if (!stage_.defined() || stage_.nbytes() < bytes) {
    const auto size = static_cast<int64_t>(std::bit_ceil(std::max<size_t>(bytes, 64 << 10)));
    stage_ = at::Tensor();
    stage_ = shared_ ? shared_->allocateTensor(static_cast<long>(size), at::TensorOptions(at::kByte))
                     : at::empty({size}, at::TensorOptions(at::kByte));
  }
  return static_cast<std::byte*>(stage_.mutable_data_ptr());
}

uint64_t Machine::place_of(const void* memory) const {
  if (memory == nullptr) return 0;
  return shared_ ? shared_->core().arena()->offset(memory) : reinterpret_cast<uint64_t>(memory);
}

std::byte* Machine::at(int local, uint64_t place) const {
  return shared_ ? shared_->core().memory_of(local, place) : reinterpret_cast<std::byte*>(place);
}

std::vector<Card> Machine::meet(const Card& mine, std::chrono::milliseconds timeout) const {
  if (!shared_) return {mine};
  std::vector<Card> cards(static_cast<size_t>(size()));
  shm::Request request;
  request.kind = shm::OperationKind::kAllGather;
  request.count = sizeof mine;
  request.called_as = shm::CalledAs::kPartWithinMachine;
  request.input = &mine;
  request.output = cards.data();
  shared_->core().run(std::move(request), timeout);
  for (const Card& card : cards)
    if (card.tag != mine.tag) throw Disagreement();
  return cards;
}

void Machine::wait_for_all(std::chrono::milliseconds timeout) const {
  if (!shared_) return;
  shm::Request request;
  request.called_as = shm::CalledAs::kPartWithinMachine;
  shared_->core().run(std::move(request), timeout);
}

c10::intrusive_ptr<shm_engine::ShmBackend> form_machine(const c10::intrusive_ptr<c10d::Store>& store,
                                                        const Layout& layout, std::chrono::milliseconds timeout,
                                                        std::chrono::milliseconds join_timeout) {
  const int count = layout.ranks_on(layout.here());
  if (count == 1) return {};
  const auto here = c10::make_intrusive<c10d::PrefixStore>("machine" + std::to_string(layout.here()), store);
  shm::BootstrapOptions bootstrap;
  bootstrap.timeout = std::min(join_timeout, bootstrap.timeout);
  auto exchange = shm_engine::exchange_over(here, layout.local(), count, join_timeout);
  auto world = shm::bootstrap(layout.local(), count, exchange, bootstrap);
  world.call_ranks(layout.ranks[static_cast<size_t>(layout.here())]);
  auto engine = c10::make_intrusive<shm_engine::ShmBackend>(
      std::make_shared<shm_engine::BackendState>(std::move(world)), timeout, "hierarchical");
  // The runner's thread, too.
  engine->core().with_waiter([](shm::Waiter& waiter) { waiter.expect_several_callers(); });
  return engine;
}

}  // namespace lockstep::hierarchical_engine
