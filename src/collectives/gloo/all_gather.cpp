#include "collectives/gloo/messages.h"

#include <algorithm>
#include <vector>

#include <ATen/ATen.h>

#include "collectives/operand.h"
#include "rank_page/rank_board.h"

namespace lockstep::gloo_engine {
namespace {

/// Received within one wait; a launcher sees progress at each.
constexpr int64_t kGatheredAtOnce = int64_t{4} << 20;

}  // namespace

void all_gather(const at::Tensor& rows, const at::Tensor& row, int rank, int world_size, const Messages& messages) {
  const at::Tensor bytes = as_bytes(row);
  const auto place_of = [&, all = as_bytes(rows)](int owner) {
    return all.narrow(0, owner * bytes.numel(), bytes.numel());
  };
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  const auto in_pieces = [&](const Post& post, const at::Tensor& whole, int peer) {
    for (int64_t begin = 0; begin < whole.numel(); begin += kGatheredAtOnce)
      works.push_back(
          post(whole.narrow(0, begin, std::min(kGatheredAtOnce, whole.numel() - begin)), peer, Stage::kResults));
  };
  for (int i = 1; i < world_size; ++i) {
    const int peer = (rank + i) % world_size;
    in_pieces(messages.receive, place_of(peer), peer);
  }
  for (int i = 1; i < world_size; ++i) in_pieces(messages.send, bytes, (rank + i) % world_size);
  if (place_of(rank).const_data_ptr() != bytes.const_data_ptr()) place_of(rank).copy_(bytes);
  for (const auto& work : works) {
    work->wait();
    own_page().beat();
  }
}

}  // namespace lockstep::gloo_engine
