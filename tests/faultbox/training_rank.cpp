// A small training that uses what real ones use - DistributedDataParallel with several buckets, Checkpointer, resume -
// and takes half a second: the program that faultbox breaks. Its result depends only on the numbers of ranks and steps.
// `sharded=replicated` or `shared`: the ranks share out the steps of an AdamW.
// `memory=1`: it also saves to the launcher's memory after each step. `net=mlp`: an MLP of 5.8 million parameters, and
// LibTorch's AdamW.
// `collectives=1`: instead of a training, the same collective over and over, and another one on one rank.

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <thread>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "faultbox/injector.h"

namespace {

using lockstep::faultbox::Injector;
using lockstep::faultbox::Place;

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t inputs, int64_t width)
      : first(register_module("first", torch::nn::Linear(inputs, width))),
        second(register_module("second", torch::nn::Linear(width, width))),
        out(register_module("out", torch::nn::Linear(width, 10))) {}
  torch::Tensor forward(const torch::Tensor& x) { return out(torch::relu(second(torch::relu(first(x))))); }
  torch::nn::Linear first, second, out;
};
TORCH_MODULE(Net);

/// `sharded`: as train_fashion_mnist has it.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const lockstep::DistributedDataParallel<Net>& model,
                                                        const Net& net, const std::string& sharded, bool mlp) {
  if (sharded == "none" && mlp)
    return std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(1e-3));
  if (sharded == "none")
    return std::make_unique<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  return std::make_unique<lockstep::ZeroRedundancyOptimizer<torch::optim::AdamW>>(
      model, torch::optim::AdamWOptions(1e-3),
      lockstep::ZeroRedundancyOptions{.shared_parameters = sharded == "shared"});
}

/// The exit code.
int train(Injector& injector, lockstep::Context& context) {
  const int64_t steps = injector.number("steps", 12);
  const bool in_memory = injector.number("memory", 0) != 0;
  const auto pause = std::chrono::milliseconds(injector.number("pause_ms", 0));
  const bool mlp = injector.word("net", "small") == "mlp";
  const int64_t inputs = mlp ? 784 : 256;
  Net net(inputs, mlp ? 2048 : 256);
  // Buckets of about one layer each.
  const lockstep::DistributedDataParallelOptions small{.first_bucket_cap_mb = 0.02, .bucket_cap_mb = 0.2};
  lockstep::DistributedDataParallel model(net, context, mlp ? lockstep::DistributedDataParallelOptions() : small);
  const auto optimizer = make_optimizer(model, net, injector.word("sharded", "none"), mlp);
  int64_t step = 0, bucket = 0;
  for (auto& parameter : net->parameters())
    parameter.register_hook([&injector, &step, bucket = bucket++](const torch::Tensor& gradient) {
      injector.arrive(Place::kBucket, step, bucket);
      return gradient;
    });
  lockstep::Checkpointer checkpointer(injector.word("checkpoints", context.run_dir() + "/checkpoints"), context.group(),
                                      {.every_steps = injector.number("every", 4),
                                       .asynchronous = injector.number("asynchronous", 1) != 0,
                                       .memory_every_n_steps = in_memory ? std::optional<int64_t>(1) : std::nullopt});
  checkpointer.add("model", *net).add("optimizer", *optimizer);
  // So that a save takes a while; whatever is torn is noticed.
  const bool has_ballast = in_memory && !mlp;
  torch::Tensor ballast = torch::zeros({has_ballast ? 4 << 20 : 0});
  if (has_ballast)
    checkpointer.add("ballast", lockstep::Checkpointer::Part{
                                    .save = [&ballast] { return c10::IValue(ballast); },
                                    .load = [&ballast](const c10::IValue& state) { ballast.copy_(state.toTensor()); }});
  if (checkpointer.resume()) step = checkpointer.resumed_step();
  if (!ballast.eq(step).all().item<bool>())
    throw std::runtime_error("the state of step " + std::to_string(step) + " is torn");
  if (context.is_main()) injector.page().resumed_step = step + 1;
  for (; step < steps; ++step) {
    // Data depend on rank and step alone, so a resumed run goes on with the same.
    torch::manual_seed(static_cast<uint64_t>(1000 * step + context.rank()));
    const torch::Tensor data = torch::randn({32, inputs}), target = torch::randint(10, {32}, torch::kLong);
    injector.arrive(Place::kForward, step);
    optimizer->zero_grad();
    const torch::Tensor loss = torch::nn::functional::cross_entropy(model(data), target);
    loss.backward();
    injector.arrive(Place::kOptimizer, step);
    optimizer->step();
    if (context.is_main()) ++injector.page().made;
    ballast.fill_(step + 1);
    injector.arrive(in_memory ? Place::kMemorySave : Place::kSave, step);
    checkpointer.step(step + 1);
    if (in_memory) injector.arrive(Place::kSave, step);
    if (injector.number("preempt", 0) != 0 && context.stop_requested()) {
      checkpointer.save(step + 1);
      checkpointer.finish();
      return lockstep::kPreempted;
    }
    if (pause.count() > 0) std::this_thread::sleep_for(pause);
  }
  checkpointer.finish();
  const std::string result = injector.word("result", "");
  if (context.is_main() && !result.empty()) std::ofstream(result) << lockstep::hash(lockstep::state_dict(*net)) << '\n';
  injector.arrive(Place::kExit, steps);
  return 0;
}

/// One operation by name; the rows of `all` are the ranks'.
void operate(const lockstep::Group& group, const std::string& name) {
  const int64_t ranks = group.world_size();
  torch::Tensor one = torch::ones({6}), all = torch::ones({ranks, 6});
  if (name == "all_reduce")
    group.all_reduce(one);
  else if (name == "all_reduce_longer")
    group.all_reduce(torch::ones({7}));
  else if (name == "all_reduce_double")
    group.all_reduce(torch::ones({6}, torch::kDouble));
  else if (name == "all_reduce_max")
    group.all_reduce(one, lockstep::ReduceOp::kMax);
  else if (name == "broadcast")
    group.broadcast(one);
  else if (name == "broadcast_from_1")
    group.broadcast(one, 1);
  else if (name == "reduce")
    group.reduce(one);
  else if (name == "all_gather")
    (void)group.all_gather(one);
  else if (name == "gather")
    group.gather(one);
  else if (name == "scatter")
    group.scatter(one, all);
  else if (name == "reduce_scatter")
    (void)group.reduce_scatter(all);
  else if (name == "all_to_all")
    (void)group.all_to_all(all);
  else if (name == "barrier")
    group.barrier();
  else
    throw std::runtime_error("no such operation: " + name);
}

void call_collectives(Injector& injector, const lockstep::Context& context) {
  const std::string usual = injector.word("usual", "all_reduce"), other = injector.word("other", "barrier");
  const int64_t steps = injector.number("steps", 12), odd_step = injector.number("step", 6);
  for (int64_t step = 0; step < steps; ++step) {
    injector.arrive(Place::kForward, step);
    if (!injector.chosen() || step != odd_step) {
      operate(context.group(), usual);
      continue;
    }
    injector.note_fault();
    if (other == "stay away") std::this_thread::sleep_for(std::chrono::minutes(10));
    if (other == "leave") return;
    if (other != "skip") operate(context.group(), other);
  }
  injector.arrive(Place::kExit, steps);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Injector injector(argc, argv);
    injector.arrive(Place::kRendezvous, 0);
    {
      lockstep::Context context(argc, argv, {.seed = 1, .announce = false});
      torch::set_num_threads(1);
      if (injector.number("collectives", 0) != 0)
        call_collectives(injector, context);
      else if (const int code = train(injector, context); code != 0)
        return code;
    }
    injector.arrive(Place::kEnd, 0);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "training_rank: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "training_rank: %s\n", error.what());
    return 1;
  }
}
