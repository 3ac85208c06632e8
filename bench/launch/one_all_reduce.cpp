// The shortest program that trains nothing: joins the ranks, adds up one number and leaves. What bench_launch.py
// starts.

#include <cstdio>
#include <exception>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

int main(int argc, char** argv) {
  try {
    lockstep::Context context(argc, argv, {.announce = false});
    const torch::Tensor ranks = torch::ones({1});
    context.group().all_reduce(ranks);
    if (ranks.item<float>() == static_cast<float>(context.world_size())) return 0;
    std::fprintf(stderr, "one_all_reduce: %g ranks were counted, not %d\n", ranks.item<double>(), context.world_size());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "one_all_reduce: %s\n", error.what());
  }
  return 1;
}
