#include <functional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/context.h>

#include "rank_page/rank_board.h"
#include "support/ranks.h"

// A launcher takes ranks whose pages do not change for hanging. One collective may move for longer than it waits.

namespace lockstep {
namespace {

using lockstep::testing::Engine;
using lockstep::testing::run_ranks;

class Beats : public ::testing::TestWithParam<Engine> {};
const Engine kBeating[] = {{2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}, {3, "hierarchical", "aab"}};
INSTANTIATE_TEST_SUITE_P(Engines, Beats, ::testing::ValuesIn(kBeating),
                         [](const auto& instance) { return lockstep::testing::name_of(instance.param); });

TEST_P(Beats, GoOnWithinOneCollective) {
  run_ranks(GetParam(), [](Context& context) {
    const auto beats_during = [&](const std::function<void()>& call) {
      const uint64_t before = own_page().read(context.world_size()).beats;
      call();
      // One rank that goes on is enough for a launcher; of a machine's ranks one may do all the moving.
      const uint64_t own = own_page().read(context.world_size()).beats - before;
      const at::Tensor most = at::tensor(static_cast<double>(own));
      context.group().all_reduce(most, ReduceOp::kMax);
      return most.item<double>();
    };
    const Group& group = context.group();
    const int64_t few = 4, many = int64_t{8} << 20;  // 16 bytes and 32 MiB
    const double at_ends = beats_during([&] { group.all_reduce(at::ones({few})); });
    EXPECT_GE(beats_during([&] { group.all_reduce(at::ones({many})); }), at_ends + 8);
    EXPECT_GE(beats_during([&] { (void)group.all_gather(at::ones({many})); }), at_ends + 8);
    if (group.backend() == "gloo") return;  // LibTorch's own broadcast does not say how far it is
    EXPECT_GE(beats_during([&] { group.broadcast(at::ones({many})); }), at_ends + 8);
  });
}

}  // namespace
}  // namespace lockstep
