// A rank that leaves out a call of the model, or makes one more: ranks of several machines then wait in groups of some
// ranks each, where no engine sees that nobody can go on.

#include <lockstep/fully_sharded_data_parallel.h>

#include <signal.h>
#include <sys/wait.h>

#include <thread>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "fully_sharded/small_gpt.h"
#include "support/golden_message.h"
#include "support/told_in_time.h"

namespace lockstep::skipped_calls_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::SGDOptions;

const Engine kAll[] = {{2, "shm"},
                       {3, "shm"},
                       {2, "gloo"},
                       {3, "gloo"},
                       {2, "hierarchical", "ab"},
                       {3, "hierarchical", "abc"},
                       {4, "hierarchical", "aabb"}};

struct Training {
  explicit Training(const Context& context) : model(net, context), optimizer(model, SGDOptions(0.1)) {}
  at::Tensor loss() { return loss_of(model(text_of(0, 0)), text_of(0, 0)); }
  void train() {
    optimizer.zero_grad();
    loss().backward();
    optimizer.step();
  }
  SmallGpt net{3};
  FullyShardedDataParallel<SmallGpt> model;
  ZeroRedundancyOptimizer<torch::optim::SGD> optimizer;
};

struct Program {
  std::string name;
  bool is_for_all;  ///< engines
  std::function<void(Training&)> odd;
  std::function<void(Training&)> rest = [](Training& training) { training.train(); };
};

const std::vector<Program>& programs() {
  static const std::vector<Program> kPrograms{
      {"backward_left_out", true,
       [](Training& one) {
         (void)one.loss();
         one.optimizer.step();
       }},
      {"step_left_out", false, [](Training& one) { one.loss().backward(); },
       [](Training& one) {
         one.loss().backward();
         one.optimizer.step();
       }},
      {"batch_left_out", false, [](Training& one) { (void)one.model.clip_grad_norm(1); }},
      {"hash_of_one_rank", true, [](Training& one) { (void)one.model.hash(); }},
      {"state_dict_of_one_rank", false, [](Training& one) { (void)one.model.state_dict(); }},
      {"state_loaded_by_one_rank", false,
       [](Training& one) {
         SmallGpt other(3);
         one.model.load_state_dict(state_dict(*other));
       }},
      {"end_of_one_rank", true, [](Training&) {}},
  };
  return kPrograms;
}

class SkippedCallsOn : public ::testing::TestWithParam<Engine> {};
INSTANTIATE_TEST_SUITE_P(Machines, SkippedCallsOn, ::testing::ValuesIn(kAll),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(SkippedCallsOn, AreToldOnAllRanks) {
  const Engine& engine = GetParam();
  const bool has_parts = engine.machines == "aabb";  // of all ranks, in which some wait
  for (const Program& program : programs())
    if (has_parts || program.is_for_all)
      run_alike(engine, [&](Context& context) {
        const std::string of = name_of(engine) + ", rank " + std::to_string(context.rank()) + " of " + program.name;
        const bool odd = context.rank() == context.world_size() - 1;
        std::string said;
        auto start = Clock::now();
        {
          Training training(context);
          training.train();
          context.group().barrier();
          start = Clock::now();
          try {
            (odd ? program.odd : program.rest)(training);
            if (program.name == "step_left_out" && odd) (void)training.model.hash();
            if (program.name != "end_of_one_rank" && odd) context.group().barrier();
          } catch (const std::exception& error) {
            said = error.what();
          }
        }
        expect_told_in_time(start, of);
        if (odd && program.name == "end_of_one_rank") return;
        EXPECT_NE(said, "") << of;
        if (!has_parts) return;
        const std::string golden = golden_message("tests/fully_sharded/wrong_programs.txt", program.name, "");
        EXPECT_TRUE(matches_golden(said, golden)) << of << " says\n" << said << "\nnot\n" << golden;
      });
}

TEST(SkippedCalls, ARankThatEndsWithoutAWordIsNamedByItsNumberOfAll) {
  run_alike({4, "hierarchical", "aabb"}, [](Context& context) {
    Training training(context);
    training.train();
    context.group().barrier();
    if (context.rank() == 3) ::_exit(0);
    const auto start = Clock::now();
    std::string said;
    try {
      training.train();
    } catch (const std::exception& error) {
      said = error.what();
    }
    expect_told_in_time(start);
    // Whoever waits for it does so in the group of its machine or its rail, by whose numbers engines call it rank 1.
    EXPECT_NE(said.find(", 3 of all."), std::string::npos) << said;
  });
}

TEST(SkippedCalls, AStoppedRankMakesNone) {
  run_alike({4, "hierarchical", "aabb"}, [](Context& context) {
    Training training(context);
    training.train();
    const pid_t self = ::getpid();
    const pid_t helper = context.rank() == 3 ? ::fork() : -1;
    if (helper == 0) {
      for (int times = 0; times < 3; ++times) {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        ::kill(self, SIGSTOP);
        std::this_thread::sleep_for(std::chrono::milliseconds(3500));
        ::kill(self, SIGCONT);
      }
      ::_exit(0);
    }
    const auto start = Clock::now();
    bool goes_on = true;
    for (int step = 0; goes_on; ++step) {
      training.train();
      if (step % 20 == 0)
        goes_on = context.group().broadcast_bytes(seconds_since(start) < 11.5 ? "1" : "0", /*root=*/3) == "1";
    }
    (void)training.model.hash();
    if (helper > 0) ::waitpid(helper, nullptr, 0);
  });
}

}  // namespace
}  // namespace lockstep::skipped_calls_test
