#include "collectives/gloo/messages.h"

#include <algorithm>
#include <vector>

#include <ATen/ATen.h>

#include "collectives/operand.h"
#include "rank_page/rank_board.h"

namespace lockstep::gloo_engine {
namespace {

/// Received within one wait; a launcher sees progress at each.
constexpr int64_t kMovedAtOnce = int64_t{4} << 20;

}  // namespace

void exchange_parts(PartOfRank sent, PartOfRank received, int rank, int world_size, Stage stage,
                    const Messages& messages) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  const auto in_pieces = [&](const Post& post, const at::Tensor& part, int peer) {
    for (int64_t begin = 0; begin < part.numel(); begin += kMovedAtOnce)
      works.push_back(post(part.narrow(0, begin, std::min(kMovedAtOnce, part.numel() - begin)), peer, stage));
  };
  for (int i = 1; i < world_size; ++i)
    in_pieces(messages.receive, received((rank + i) % world_size), (rank + i) % world_size);
  for (int i = 1; i < world_size; ++i) in_pieces(messages.send, sent((rank + i) % world_size), (rank + i) % world_size);
  const at::Tensor own = received(rank), from = sent(rank);
  if (own.const_data_ptr() != from.const_data_ptr()) own.copy_(from);
  for (const auto& work : works) {
    work->wait();
    own_page().beat();
  }
}

void all_gather(const at::Tensor& rows, const at::Tensor& row, int rank, int world_size, const Messages& messages) {
  const at::Tensor bytes = as_bytes(row), all = as_bytes(rows);
  exchange_parts([&](int) { return bytes; },
                 [&](int owner) { return all.narrow(0, owner * bytes.numel(), bytes.numel()); }, rank, world_size,
                 Stage::kResults, messages);
}

}  // namespace lockstep::gloo_engine
