#include "collectives/gloo/all_gather.h"

#include <vector>

#include <ATen/ATen.h>

#include "collectives/operand.h"

namespace lockstep::gloo_engine {

void all_gather(const at::Tensor& rows, const at::Tensor& row, int rank, int world_size, const Messages& messages) {
  const at::Tensor bytes = as_bytes(row);
  const auto place_of = [&, all = as_bytes(rows)](int owner) {
    return all.narrow(0, owner * bytes.numel(), bytes.numel());
  };
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int i = 1; i < world_size; ++i) {
    const int peer = (rank + i) % world_size;
    works.push_back(messages.receive(place_of(peer), peer, Stage::kResults));
  }
  for (int i = 1; i < world_size; ++i) works.push_back(messages.send(bytes, (rank + i) % world_size, Stage::kResults));
  if (place_of(rank).const_data_ptr() != bytes.const_data_ptr()) place_of(rank).copy_(bytes);
  for (const auto& work : works) work->wait();
}

}  // namespace lockstep::gloo_engine
