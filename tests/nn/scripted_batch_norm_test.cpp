#include <gtest/gtest.h>

#include <torch/script.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/sync_batch_norm.h>

#include "data_parallel/models.h"
#include "support/complaint.h"
#include "support/ranks.h"

// Networks written by Python (tests/golden/write_scripted_golden.py) on several ranks, against the same file on the
// whole batch in one process, where TorchScript's executor may optimize.

namespace lockstep::scripted_batch_norm_test {
namespace {

using namespace testing;  // NOLINT

torch::jit::Module load_golden(const std::string& name, at::ScalarType dtype = at::kFloat) {
  torch::jit::Module net = torch::jit::load(LOCKSTEP_SOURCE_DIR "/tests/golden/" + name);
  net.to(dtype);
  net.train();
  return net;
}

std::vector<at::Tensor> parameters_of(const torch::jit::Module& net) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : net.parameters()) parameters.push_back(parameter);
  return parameters;
}

torch::optim::SGD optimizer_of(const torch::jit::Module& net) {
  return torch::optim::SGD(parameters_of(net), torch::optim::SGDOptions(0.05).momentum(0.9));
}

/// Relative to the largest number, or absolute if all are below 1.
double largest_difference(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.numel() == 0) return 0;
  const at::Tensor a = actual.to(at::kDouble), b = expected.to(at::kDouble);
  return (a - b).abs().max().item<double>() / std::max(1.0, b.abs().max().item<double>());
}

template <typename List>
void expect_near(const List& actual, const List& expected, double tolerance) {
  auto other = expected.begin();
  for (const auto& item : actual) {
    EXPECT_EQ(item.name, (*other).name);
    EXPECT_LE(largest_difference(item.value, (*other).value), tolerance) << item.name;
    ++other;
  }
}

/// Uneven batches, with shapes that change from step to step; some are empty.
int64_t samples_of(int step, int rank) { return (step + 2 * rank) % 5 == 0 ? 0 : 2 + rank + step % 3; }

struct Case {
  Engine engine;
  const char* file;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << name_of(c.engine) << c.file; }
};

struct ScriptedBatchNorm : ::testing::TestWithParam<Case> {};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const char* file : {"scripted_batch_norm.pt", "traced_batch_norm.pt"})
    for (const Engine& engine :
         {Engine{1, ""}, Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}})
      cases.push_back({engine, file});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Files, ScriptedBatchNorm, ::testing::ValuesIn(all_cases()), [](const auto& instance) {
  return name_of(instance.param.engine) + "_" + std::string(instance.param.file).substr(0, 6);
});

/// Outputs, gradients of the inputs, weights after 12 steps and running statistics: more steps than the executor needs
/// to start optimizing.
TEST_P(ScriptedBatchNorm, TrainsAsOneProcessWithTheWholeBatch) {
  run_ranks(GetParam().engine, [file = GetParam().file](Context& context) {
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      const double tolerance = dtype == at::kDouble ? 1e-12 : 1e-6;
      auto net = load_golden(file, dtype), alone = load_golden(file, dtype);
      EXPECT_EQ(convert_sync_batchnorm(net, context.group()), 3);
      // Small buckets: reductions of gradients start between the batch norms of backward.
      DistributedDataParallel<torch::jit::Module> replica(
          net, context, {.first_bucket_cap_mb = 1e-5, .bucket_cap_mb = 1e-5, .reduction = GradientReduction::kSum});
      auto optimizer = optimizer_of(net), expected = optimizer_of(alone);
      for (int step = 0; step < 12; ++step) {
        std::vector<at::Tensor> data, target;
        int64_t first = 0;
        for (int rank = 0; rank < context.world_size(); ++rank) {
          const Sample part = batch(step, rank, dtype, samples_of(step, rank));
          if (rank < context.rank()) first += part.data.size(0);
          data.push_back(part.data), target.push_back(part.target);
        }
        const at::Tensor whole = at::cat(data).requires_grad_(), whole_target = at::cat(target);
        if (whole.size(0) < 2) continue;
        const auto mine = static_cast<size_t>(context.rank());
        const at::Tensor own = data[mine].clone().requires_grad_();
        optimizer.zero_grad(), expected.zero_grad();
        const at::Tensor output = net.forward({own}).toTensor(), whole_output = alone.forward({whole}).toTensor();
        EXPECT_LE(largest_difference(output, whole_output.narrow(0, first, own.size(0))), tolerance) << step;
        ((output - target[mine]).square().sum() / 10).backward();
        ((whole_output - whole_target).square().sum() / 10).backward();
        EXPECT_LE(largest_difference(own.grad(), whole.grad().narrow(0, first, own.size(0))), tolerance) << step;
        optimizer.step(), expected.step();
      }
      expect_near(net.named_parameters(), alone.named_parameters(), 5 * tolerance);
      expect_near(net.named_buffers(), alone.named_buffers(), 5 * tolerance);
      net.eval(), alone.eval();
      const at::Tensor input = batch(50, context.rank(), dtype).data;
      EXPECT_LE(largest_difference(net.forward({input}).toTensor(), alone.forward({input}).toTensor()), 5 * tolerance);
    }
  });
}

TEST(ConvertScripted, RefusesWhatItCannotDo) {
  run_ranks(2, [](Context& context) {
    const auto refusal = [&](const std::string& file) {
      const auto net = load_golden(file);
      return complaint([&] { convert_sync_batchnorm(net, context.group()); });
    };
    EXPECT_NE(refusal("scripted_own_norm.pt").find("1 calls batch_norm directly"), std::string::npos)
        << refusal("scripted_own_norm.pt");
    const std::string traced = refusal("traced_in_eval.pt");
    for (const char* part : {"nothing was converted", "bn1 was traced in eval()", "right.1 was traced"})
      EXPECT_NE(traced.find(part), std::string::npos) << part << "\nis not in\n" << traced;
    torch::jit::Module without("without");
    EXPECT_EQ(convert_sync_batchnorm(without, context.group()), 0);
    // Nothing was converted: ranks would wait for each other here.
    auto net = load_golden("traced_in_eval.pt");
    if (context.rank() == 0) net.forward({at::rand({4, 6})});
  });
}

/// A module that the executor has optimized for one process would leave out the other ranks and give wrong numbers.
TEST(ConvertScripted, AModuleThatWasOptimizedBeforeItWasConvertedSaysSo) {
  run_ranks(2, [](Context& context) {
    auto net = load_golden("scripted_batch_norm.pt");
    const auto step = [&] { net.forward({batch(0, context.rank()).data}).toTensor().sum().backward(); };
    for (int run = 0; run < 4; ++run) step();
    convert_sync_batchnorm(net, context.group());
    std::string text;
    try {
      step();
    } catch (const std::exception& error) {  // the interpreter rethrows as a type of its own
      text = error.what();
    }
    EXPECT_NE(text.find("a module ran before it was converted"), std::string::npos) << text;
    net.eval();
    EXPECT_EQ(net.forward({batch(0, 0).data}).toTensor().size(0), 4);
  });
}

}  // namespace
}  // namespace lockstep::scripted_batch_norm_test
