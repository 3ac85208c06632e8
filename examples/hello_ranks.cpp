// Ranks find each other, introduce themselves, and add up a number.
//
//     lockstep run -n 2 -- build/bin/hello_ranks
//
// prints, on a machine without CUDA,
//
//     rank 0 of 2, local rank 0 of 2, on cpu
//     rank 1 of 2, local rank 1 of 2, on cpu
//     1 + ... + 2 = 3

#include <cstdio>
#include <sstream>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

namespace {

void say_hello(const lockstep::Context& context) {
  std::ostringstream hello;
  hello << "rank " << context.rank() << " of " << context.world_size() << ", local rank " << context.local_rank()
        << " of " << context.local_world_size() << ", on " << lockstep::device();
  // Lines that ranks print by themselves come in any order; rank 0 prints them in order.
  const std::vector<std::string> hellos = context.group().all_gather_bytes(hello.str());

  const torch::Tensor sum = torch::full({1}, context.rank() + 1, torch::kLong);
  context.group().all_reduce(sum);

  lockstep::rank_zero_only(context.group(), [&] {
    for (const std::string& line : hellos) std::printf("%s\n", line.c_str());
    std::printf("1 + ... + %d = %ld\n", context.world_size(), sum.item<int64_t>());
  });
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Every rank says who it is, and all add up 1 + rank."};
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    const lockstep::Context context;
    say_hello(context);
    return 0;
  });
}
