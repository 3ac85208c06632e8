// A program that makes three Contexts one after the other: meets_again MODE [--ranks N]. Each rank prints what it added
// up in each. MODE is the backend, or
//   both     a second Context while there is one: the error's text is printed, and the first goes on
//   faults   under torchrun: in each of the first three starts rank 1 ends in another way and place

#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <thread>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace {

int64_t sum_over(const lockstep::Group& group) {
  const torch::Tensor sum = torch::full({1000}, group.rank() + 1, torch::kLong);
  group.all_reduce(sum);
  return sum[999].item<int64_t>();
}

int add_up(const lockstep::Context& context, int number) {
  // One is ahead of the others into the next Context, another one each time.
  if (context.rank() == number % context.world_size()) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const int64_t everybody = sum_over(context.group());
  std::vector<int> outer{0};
  if (context.world_size() > 1) outer.push_back(context.world_size() - 1);
  const auto part = context.group().subgroup(outer);
  std::cout << context.rank() << ":" << number << ":" << everybody << ":" << (part ? sum_over(*part) : 0) << std::endl;
  return 0;
}

int try_both(const lockstep::Context& context) {
  try {
    const lockstep::Context second({.announce = false});
    return 1;
  } catch (const lockstep::Error& error) {
    std::cout << error.what() << std::endl;
  }
  return add_up(context, 0);
}

int fail_in_start(int start) {
  const char* rank = std::getenv("RANK");
  const bool faulty = rank != nullptr && std::string(rank) == "1";
  if (faulty && start == 2) ::raise(SIGKILL);
  const lockstep::Context context({.announce = false});
  if (faulty && start == 0) ::raise(SIGKILL);
  sum_over(context.group());
  if (faulty && start == 1) throw std::runtime_error("on purpose");
  return add_up(context, start);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argv[1];
  if (const char* start = std::getenv("TORCHELASTIC_RESTART_COUNT"); start != nullptr && mode == "faults")
    return fail_in_start(std::atoi(start));
  for (int number = 0; number < 3; ++number) {
    const lockstep::Context context(argc, argv, {.backend = mode == "both" ? "" : mode, .announce = false});
    if (mode == "both") return try_both(context);
    add_up(context, number);
  }
}
