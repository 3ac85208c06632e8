// Fine-tuning: a network learns one task, is saved, and a new program part loads its body for another task, of which
// there are few examples. At first only the new head learns; then the body is thawed and learns more slowly.
//
//     lockstep run -n 2 -- build/bin/fine_tune --checkpoint body.safetensors
//
// prints lines such as
//
//     eight shapes, step 200/200  loss 0.8970  unseen pictures 0.93
//     the body, from body.safetensors: 8 of 10 tensors
//     four new shapes, step 60/120  loss 0.8345  unseen pictures 0.74  trains 260 of 27716 numbers
//     four new shapes, step 120/120  loss 0.4452  unseen pictures 0.87  trains 27716 of 27716 numbers
//
// If the file is there already, the first task is left out.
//
// Points to copy:
//
// - Rank 0 alone writes the file, and the others wait until it is there. Then each rank reads it. A load that is not
//   strict reports what it did not find: here only the head.
// - parameter_groups() leaves out what is frozen. Thawed parameters become a group of their own, with its own learning
//   rate, and refresh() attaches to them; freezing alone needs no call.
// - Frozen layers cost no message: their gradients are neither computed nor sent.

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

namespace nn = torch::nn;

struct Options {
  int steps = 120, first_steps = 200, batch_size = 48;
  bool use_double = false;
  uint64_t seed = 1;
  std::string checkpoint, json;
};

constexpr int64_t kSide = 16;

/// Pictures [n, 1, kSide, kSide] of waves with noise; the shape of a wave, from `first` on, is the target. Drawn anew
/// in each epoch, from the seed of each sample.
lockstep::datasets::FromFunction waves(int64_t size, int64_t first, int64_t shapes) {
  return {size, [first, shapes](at::ArrayRef<int64_t> indices, at::ArrayRef<uint64_t> seeds) {
            const torch::Tensor x = torch::arange(kSide, torch::kDouble), y = x.unsqueeze(1);
            std::vector<torch::Tensor> pictures;
            for (size_t i = 0; i < indices.size(); ++i) {
              auto random = at::make_generator<at::CPUGeneratorImpl>(seeds[i]);
              const auto shape = static_cast<double>(first + indices[i] % shapes);
              const double angle = 0.26 * shape, length = 0.6 + 0.05 * shape;
              const torch::Tensor phase = 6.3 * torch::rand({1}, random, torch::kDouble);
              pictures.push_back((length * (std::cos(angle) * x + std::sin(angle) * y) + phase).sin() +
                                 1.2 * torch::randn({kSide, kSide}, random, torch::kDouble));
            }
            return lockstep::Batch{torch::stack(pictures).unsqueeze(1), torch::tensor(indices) % shapes};
          }};
}

struct NetImpl : nn::Module {
  explicit NetImpl(int64_t shapes) : head(register_module("head", nn::Linear(64, shapes))) {}
  /// Returns scores of the shapes.
  torch::Tensor forward(const torch::Tensor& pictures) { return head(body->forward(pictures)); }

  static nn::Conv2d layer(int64_t from, int64_t to) {
    return nn::Conv2d(nn::Conv2dOptions(from, to, 3).stride(2).padding(1));
  }
  nn::Sequential body{register_module(
      "body", nn::Sequential(layer(1, 16), nn::ReLU(), layer(16, 32), nn::ReLU(), layer(32, 64), nn::ReLU(),
                             nn::AdaptiveAvgPool2d(1), nn::Flatten(), nn::Linear(64, 64), nn::ReLU()))};
  nn::Linear head;
};
TORCH_MODULE(Net);

class Task {
 public:
  Task(const Options& options, const lockstep::Context& context, const char* name, int64_t first, int64_t shapes,
       int64_t samples)
      : net(shapes),
        name_(name),
        context_(context),
        dtype_(options.use_double ? torch::kDouble : torch::kFloat),
        train_(waves(samples, first, shapes), context,
               {.batch_size = options.batch_size, .split_batches = true, .shuffle = true, .drop_last = true}),
        unseen_(waves(200, first, shapes), context,
                {.batch_size = 50, .exactly_once = true, .seed = options.seed + 1}) {
    net->to(dtype_);
  }

  /// Until `last` of `steps` steps have been made.
  void learn(lockstep::DistributedDataParallel<Net>& model, torch::optim::Optimizer& optimizer, int last, int steps) {
    lockstep::Metrics metrics;
    auto& mean = metrics.add("loss", lockstep::Mean());
    while (step_ < last) {
      for (auto& [pictures, shapes] : train_) {
        const torch::Tensor loss = nn::functional::cross_entropy(model(pictures.to(dtype_)), shapes);
        loss.backward();
        mean.update(loss, pictures.size(0));
        if (!model.step_complete()) continue;  // with virtual ranks: others of this rank are still to come
        optimizer.step();
        optimizer.zero_grad();
        if (++step_ == last) break;
      }
    }
    metrics.reduce(context_.group());
    losses.push_back(mean.value());
    right.push_back(judge());
    if (context_.is_main())
      std::printf("%s, step %d/%d  loss %.4f  unseen pictures %.2f", name_, step_, steps, mean.value(), right.back());
  }

  Net net;
  std::vector<double> losses, right;

 private:
  double judge() {
    const torch::NoGradGuard no_grad;
    torch::Tensor count = torch::zeros({}, torch::kLong);
    for (auto& [pictures, shapes] : unseen_) count += (net(pictures.to(dtype_)).argmax(1) == shapes).sum();
    context_.group().all_reduce(count);
    return count.item<double>() / static_cast<double>(unseen_.dataset_size());
  }

  const char* name_;
  const lockstep::Context& context_;
  const torch::ScalarType dtype_;
  lockstep::DataLoader train_, unseen_;
  int step_ = 0;
};

void learn_first(const Options& options, const lockstep::Context& context) {
  Task task(options, context, "eight shapes", 0, 8, 9600);
  lockstep::DistributedDataParallel model(task.net, context);
  torch::optim::Adam optimizer(task.net->parameters(), torch::optim::AdamOptions(2e-3));
  task.learn(model, optimizer, options.first_steps, options.first_steps);
  if (!context.is_main()) return;
  std::printf("\n");
  lockstep::save(lockstep::state_dict(*task.net), options.checkpoint);
}

int64_t numbers(const nn::Module& module, bool trained_only) {
  int64_t sum = 0;
  for (const torch::Tensor& parameter : module.parameters())
    if (parameter.requires_grad() || !trained_only) sum += parameter.numel();
  return sum;
}

void report(const Options& options, const Task& task) {
  if (options.json.empty()) return;
  std::vector<double> norms;
  for (const torch::Tensor& parameter : task.net->parameters()) norms.push_back(parameter.norm().item<double>());
  const nlohmann::ordered_json figures{{"losses", task.losses},
                                       {"right", task.right},
                                       {"weights", norms},
                                       {"hash", lockstep::hash(lockstep::state_dict(*task.net))}};
  if (!(std::ofstream(options.json) << figures.dump(2) << '\n'))
    throw lockstep::Error("the figures cannot be written to " + options.json + "; choose another --json");
}

void fine_tune(const Options& options, const lockstep::Context& context) {
  Task task(options, context, "four new shapes", 8, 4, 192);
  lockstep::StateDict body = lockstep::load(options.checkpoint).tensors;
  const auto tensors = body.size();
  body.erase("head.weight");
  body.erase("head.bias");  // of other shapes
  lockstep::load_state_dict(*task.net, body, {.strict = false});
  if (context.is_main())
    std::printf("the body, from %s: %zu of %zu tensors\n", options.checkpoint.c_str(), body.size(), tensors);

  const auto is_body = [](const std::string& name, const torch::Tensor&) { return name.starts_with("body."); };
  const auto is_head = [](const std::string& name, const torch::Tensor&) { return name.starts_with("head."); };
  const auto adam = torch::optim::AdamWOptions(5e-3);
  for (torch::Tensor& parameter : task.net->body->parameters()) parameter.requires_grad_(false);
  lockstep::DistributedDataParallel model(task.net, context);
  torch::optim::AdamW optimizer(lockstep::parameter_groups(*task.net, {{"head", is_head, adam}}), adam);
  const auto learn = [&](int last) {
    task.learn(model, optimizer, last, options.steps);
    if (context.is_main())
      std::printf("  trains %ld of %ld numbers\n", numbers(*task.net, true), numbers(*task.net, false));
  };
  learn(options.steps / 2);

  for (torch::Tensor& parameter : task.net->body->parameters()) parameter.requires_grad_(true);
  model.refresh();
  const auto slowly = torch::optim::AdamWOptions(5e-4);
  optimizer.add_param_group(
      lockstep::parameter_groups(*task.net, {{"head", is_head, adam}, {"body", is_body, slowly}})[1]);
  learn(options.steps);
  if (context.is_main()) report(options, task);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"Learns a task, and then another one with the same body, on all ranks of the launcher."};
  app.option_defaults()->always_capture_default();
  const CLI::Range at_least_two(2, std::numeric_limits<int>::max());
  app.add_option("--checkpoint", options.checkpoint, "File for the network of the first task")->required();
  app.add_option("--steps", options.steps, "Steps of the second task")->check(at_least_two);
  app.add_option("--first-steps", options.first_steps, "Steps of the first task")->check(at_least_two);
  app.add_option("--batch-size", options.batch_size, "Pictures of a step, on all ranks together")->check(at_least_two);
  app.add_flag("--double", options.use_double, "Compute in double, to compare numbers of ranks");
  app.add_option("--seed", options.seed, "Seed of weights, pictures and batches");
  app.add_option("--json", options.json, "File for the figures of the run");
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    lockstep::Context context({.seed = options.seed});
    // Rank 0 looks for the file, and all do as it finds.
    const bool is_there = context.group().broadcast_object(std::filesystem::exists(options.checkpoint)).toBool();
    if (!is_there) learn_first(options, context);
    context.group().barrier();
    fine_tune(options, context);
    return 0;
  });
}
