// Trains a network that was defined in Python: a TorchScript file, here the one written by
//
//     python3 examples/train_torchscript.py net.pt
//
// The program does not know its class. Then
//
//     lockstep run -n 2 -- build/bin/train_torchscript net.pt trained.pt --steps 400
//
// prints
//
//     6 parameters, 9098 numbers
//     step 100: loss 0.9
//     step 200: loss 0.5
//     step 300: loss 0.5
//     step 400: loss 0.4
//     trained.pt: right for 0.8 of 10000 images
//
// trained.pt is TorchScript too: torch.jit.load("trained.pt") in Python.

#include <cstdio>
#include <filesystem>
#include <limits>

#include <lockstep/lockstep.h>
#include <torch/script.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

namespace {

struct Options {
  std::string network;
  std::string trained;
  std::string data = "/usr/share/datasets/fashion-mnist";
  int batch_size = 32;
  int steps = 400;
  double lr = 0.05;
};

torch::jit::Module load_network(const std::string& path) try {
  return torch::jit::load(path, torch::kCPU);
} catch (const c10::Error& error) {
  throw lockstep::Error(path + " cannot be read as TorchScript (what torch.jit.script(module).save(path) writes): " +
                        std::string(error.what_without_backtrace()).substr(0, 200));
}

torch::Tensor scores_of(torch::jit::Module& network, const torch::Tensor& images) {
  const c10::IValue scores = network.forward({images});
  if (!scores.isTensor() || scores.toTensor().dim() != 2)
    throw lockstep::Error("the network's forward must take images [n, 1, 28, 28] and return scores [n, classes]");
  return scores.toTensor();
}

void evaluate(torch::jit::Module network, const Options& options, const lockstep::Context& context) {
  network.eval();
  lockstep::DataLoader test(lockstep::datasets::FashionMNIST(options.data, lockstep::kTest), context,
                            {.batch_size = 500, .exactly_once = true});
  lockstep::Metrics metrics;
  auto& accuracy = metrics.add("accuracy", lockstep::Accuracy());
  lockstep::evaluate(test, context.group(), metrics,
                     [&](auto& batch) { accuracy.update(scores_of(network, batch.data), batch.target); });
  if (context.is_main())
    std::printf("%s: right for %.1f of %ld images\n", options.trained.c_str(), accuracy.value(), accuracy.count());
}

void run(const Options& options, const lockstep::Context& context) {
  lockstep::DataLoader train(lockstep::datasets::FashionMNIST(options.data, lockstep::kTrain), context,
                             {.batch_size = options.batch_size, .shuffle = true, .drop_last = true});
  torch::jit::Module network = load_network(options.network);
  network.train();
  std::vector<torch::Tensor> parameters;
  int64_t numbers = 0;
  for (const torch::Tensor& parameter : network.parameters()) {
    parameters.push_back(parameter);
    numbers += parameter.numel();
  }
  if (parameters.empty()) throw lockstep::Error(options.network + " has no parameters to train");
  if (context.is_main()) std::printf("%zu parameters, %ld numbers\n", parameters.size(), numbers);

  lockstep::DistributedDataParallel<torch::jit::Module> model(network, context);
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(options.lr).momentum(0.9));
  lockstep::Metrics metrics;
  auto& mean = metrics.add("loss", lockstep::Mean());
  for (int step = 0; step < options.steps;) {
    for (auto& [data, target] : train) {  // a new order in each pass
      optimizer.zero_grad();
      const torch::Tensor loss = torch::nn::functional::cross_entropy(scores_of(network, data), target);
      loss.backward();
      optimizer.step();
      mean.update(loss, target.size(0));
      if (++step % 100 == 0 || step == options.steps) {
        metrics.reduce(context.group());
        if (context.is_main()) std::printf("step %d: loss %.1f\n", step, mean.value());
      }
      if (step == options.steps) break;
    }
  }
  lockstep::rank_zero_only(context.group(), [&] { network.save(options.trained); });
  evaluate(network, options, context);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  CLI::App app{"Trains a TorchScript network on Fashion-MNIST, on all ranks of the launcher."};
  app.add_option("network", options.network, "TorchScript file: images [n, 1, 28, 28] to scores [n, 10]")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("trained", options.trained, "File for the trained network")->required();
  app.add_option("--data", options.data, "Folder of the four IDX files, gzip or raw")->capture_default_str();
  app.add_option("--batch-size", options.batch_size, "Images per batch on each rank")
      ->capture_default_str()
      ->check(at_least_one);
  app.add_option("--steps", options.steps, "Steps of the optimizer")->capture_default_str()->check(at_least_one);
  app.add_option("--lr", options.lr, "Learning rate")->capture_default_str()->check(CLI::PositiveNumber);
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    const lockstep::Context context({.seed = 1});
    run(options, context);
    return 0;
  });
}
