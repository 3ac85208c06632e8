// A step that is captured into a CUDA graph must do what it does when it is run.

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <lockstep/distributed_data_parallel.h>

#include "gpu/on_gpu.h"

namespace lockstep {
namespace {

using testing::kGpu;
using testing::nccl_world_of_one;
using testing::run_gpu_ranks;

struct Network : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return fc2(torch::tanh(fc1(x))); }
  torch::nn::Linear fc1{register_module("fc1", torch::nn::Linear(64, 128))};
  torch::nn::Linear fc2{register_module("fc2", torch::nn::Linear(128, 8))};
};

std::shared_ptr<Network> make_network() {
  torch::manual_seed(1);
  auto network = std::make_shared<Network>();
  network->to(kGpu);
  return network;
}

torch::optim::SGD make_optimizer(Network& network) {
  return torch::optim::SGD(network.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
}

/// What a graph reads: new inputs are copied into the same memory.
struct Inputs {
  at::Tensor data = at::empty({16, 64}, kGpu), target = at::empty({16, 8}, kGpu);
  void draw(int step) {
    data.copy_(at::sin(at::arange(16 * 64, kGpu) * (step + 1.0)).view({16, 64}));
    target.copy_(at::cos(at::arange(16 * 8, kGpu) * (step + 1.0)).view({16, 8}));
  }
};

/// Captures what `step` queues.
void capture(at::cuda::CUDAGraph& graph, const std::function<void()>& step) {
  at::cuda::getCurrentCUDAStream().synchronize();
  graph.capture_begin();
  step();
  graph.capture_end();
}

TEST(Graph, AThousandReplaysOfAStepAreAThousandSteps) {
  run_gpu_ranks(1, [](Context& context) {
    constexpr int kWarm = 3, kSteps = 1000;
    const auto eager = make_network(), captured = make_network();
    const c10::cuda::CUDAStreamGuard guard(at::cuda::getStreamFromPool());
    DistributedDataParallel first(eager, context.group()), second(captured, context.group());
    torch::optim::SGD one = make_optimizer(*eager), other = make_optimizer(*captured);
    Inputs inputs;
    const auto step_of = [&](auto& replica, torch::optim::SGD& optimizer) {
      return [&] {
        optimizer.zero_grad(/*set_to_none=*/false);
        torch::mse_loss(replica(inputs.data), inputs.target).backward();
        optimizer.step();
      };
    };
    const auto run = step_of(first, one), warm = step_of(second, other);
    for (int step = 0; step < kWarm; ++step) {
      inputs.draw(step);
      run();
      warm();
    }
    at::cuda::CUDAGraph graph;
    capture(graph, warm);
    for (int step = kWarm; step < kWarm + kSteps; ++step) {
      inputs.draw(step);
      run();
      graph.replay();
    }
    const auto expected = eager->named_parameters(), actual = captured->named_parameters();
    const auto fresh = make_network();
    for (const auto& item : expected) {
      EXPECT_TRUE(at::equal(actual[item.key()], item.value())) << item.key();
      EXPECT_FALSE(at::equal(fresh->named_parameters()[item.key()], item.value())) << item.key();
    }
    first.check_divergence();
  });
}

TEST(Graph, CapturesCollectives) {
  run_gpu_ranks(1, [](Context&) {
    const Group group = nccl_world_of_one();
    const c10::cuda::CUDAStreamGuard guard(at::cuda::getStreamFromPool());
    at::Tensor in = at::zeros({1000}, kGpu), sum = at::empty({1000}, kGpu), out = at::empty({1000}, kGpu);
    const auto work = [&] {
      sum.copy_(in * 2);
      group.all_reduce(sum);
      out.copy_(sum + 1);
      const Work async = group.all_reduce_async(out, ReduceOp::kMean);
      async.wait();
      out.add_(1);
    };
    work();
    at::cuda::CUDAGraph graph;
    capture(graph, work);
    for (int i = 1; i <= 1000; ++i) {
      in.fill_(i);
      graph.replay();
      if (i % 100 == 0) {
        EXPECT_EQ(out.sum().item<double>(), 1000.0 * (2 * i + 2));
      }
    }
    at::Tensor eager = at::ones({4}, kGpu);
    group.all_reduce(eager);
    EXPECT_EQ(eager.sum().item<double>(), 4);
  });
}

}  // namespace
}  // namespace lockstep
