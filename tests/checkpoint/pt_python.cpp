// The C++ side of a test whose other side is Python: each word is a command, followed by the files it works on.

#include <cstdio>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <lockstep/checkpointer.h>
#include <lockstep/context.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/ema.h>
#include <lockstep/error.h>
#include <lockstep/zero_redundancy_optimizer.h>

namespace {

using lockstep::load_object;

/// linear, batch norm, linear: parameters and all kinds of buffers.
torch::nn::Sequential network() {
  return torch::nn::Sequential(torch::nn::Linear(3, 5), torch::nn::BatchNorm1d(5), torch::nn::Tanh(),
                               torch::nn::Linear(5, 2));
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const std::string& kind, std::vector<at::Tensor> parameters) {
  using namespace torch::optim;
  if (kind == "SGD")
    return std::make_unique<SGD>(parameters, SGDOptions(0.05).momentum(0.9).weight_decay(1e-3).nesterov(true));
  if (kind == "plainSGD") return std::make_unique<SGD>(parameters, SGDOptions(0.05));
  if (kind == "Adam")
    return std::make_unique<Adam>(parameters, AdamOptions(0.02).betas({0.8, 0.95}).weight_decay(1e-3));
  if (kind == "AdamW") return std::make_unique<AdamW>(parameters, AdamWOptions(0.02).amsgrad(true));
  if (kind == "RMSprop")
    return std::make_unique<RMSprop>(parameters, RMSpropOptions(0.01).momentum(0.5).centered(true));
  if (kind == "Adagrad") return std::make_unique<Adagrad>(parameters, AdagradOptions(0.1).lr_decay(1e-2));
  throw lockstep::Error("unknown optimizer " + kind);
}

/// Trains on `steps` of the batches of `data` from step `first` on, and prints the loss of each.
void train(const std::vector<std::string>& words) {
  const std::string kind = words[1], state_path = words[2], data_path = words[3], result_path = words[4];
  const int first = std::stoi(words[5]), steps = std::stoi(words[6]);
  auto net = network();
  auto optimizer = optimizer_of(kind, net->parameters());
  const auto state = load_object(state_path).toGenericDict();
  lockstep::load_state_dict(*net, lockstep::to_state_dict(state.at("model")));
  if (state.contains("optimizer")) lockstep::load_optimizer_state_dict(*optimizer, state.at("optimizer"));
  const auto data = load_object(data_path).toGenericDict();
  for (int step = first; step < first + steps; ++step) {
    optimizer->zero_grad();
    const at::Tensor loss = at::mse_loss(net->forward(data.at("x").toTensor()[step]), data.at("y").toTensor()[step]);
    loss.backward();
    optimizer->step();
    std::printf("%.9g\n", loss.item<double>());
  }
  c10::impl::GenericDict result(c10::AnyType::get(), c10::AnyType::get());
  result.insert("model", lockstep::to_object(lockstep::state_dict(*net)));
  result.insert("optimizer", lockstep::optimizer_state_dict(*optimizer));
  result.insert("step", int64_t{first + steps});
  lockstep::save_object(result, result_path);
}

/// As train(), on several ranks that share out the optimizer's steps; a Checkpointer saves the result into a folder.
template <typename Optimizer, typename Options>
void train_sharded(const std::vector<std::string>& words, const Options& options) {
  const lockstep::Context context({.announce = false});
  auto net = network();
  lockstep::DistributedDataParallel model(net, context);
  lockstep::ZeroRedundancyOptimizer<Optimizer> optimizer(model, options, {.shared_parameters = words[7] == "shared"});
  const auto state = load_object(words[2]).toGenericDict();
  lockstep::load_state_dict(*net, lockstep::to_state_dict(state.at("model")));
  lockstep::load_optimizer_state_dict(optimizer, state.at("optimizer"));
  const auto data = load_object(words[3]).toGenericDict();
  const int first = std::stoi(words[5]), steps = std::stoi(words[6]);
  for (int step = first; step < first + steps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = at::mse_loss(model(data.at("x").toTensor()[step]), data.at("y").toTensor()[step]);
    loss.backward();
    optimizer.step();
    if (context.is_main()) std::printf("%.9g\n", loss.item<double>());
  }
  lockstep::Checkpointer checkpointer(words[4], context.group());
  checkpointer.add("model", model).add("optimizer", optimizer);
  checkpointer.save(first + steps);
  checkpointer.finish();
}

/// The options come with the state.
void train_sharded(const std::vector<std::string>& words) {
  using namespace torch::optim;
  if (words[1] == "SGD" || words[1] == "plainSGD") train_sharded<SGD>(words, SGDOptions(1));
  if (words[1] == "Adam") train_sharded<Adam>(words, AdamOptions(1));
  if (words[1] == "AdamW") train_sharded<AdamW>(words, AdamWOptions(1));
}

/// A tied and a plain network, saved as a user would.
void save_network(const std::string& path) {
  torch::manual_seed(3);
  auto net = network();
  lockstep::save(lockstep::state_dict(*net), path);
}

void save_shared(const std::string& path) {
  const at::Tensor base = at::arange(12, at::kFloat).reshape({3, 4});
  lockstep::StateDict state;
  state.insert("all", base);
  state.insert("row", base[1]);
  state.insert("column", base.select(1, 2));
  state.insert("transposed", base.t());
  state.insert("expanded", base[0].expand({5, 4}));
  state.insert("alone", at::ones({2}));
  lockstep::save(state, path);
}

/// One step of training, checkpointed.
void checkpoint(const std::string& folder) {
  const lockstep::Context context({.seed = 3, .announce = false});
  auto net = network();
  const auto optimizer = optimizer_of("AdamW", net->parameters());
  net->forward(at::ones({4, 3})).sum().backward();
  optimizer->step();
  int64_t epoch = 2;
  lockstep::Checkpointer checkpointer(folder, context.group());
  checkpointer.add("model", *net).add("optimizer", *optimizer).add("epoch", epoch);
  checkpointer.save(17, 0.5);
  checkpointer.finish();
}

/// Trains as train() does, with averages: files of one average alone, and a checkpoint with all.
void save_averages(const std::string& state_path, const std::string& data_path, const std::string& folder) {
  const lockstep::Context context({.seed = 3, .announce = false});
  auto net = network();
  lockstep::load_state_dict(*net, lockstep::load(state_path).tensors);
  const auto optimizer = optimizer_of("SGD", net->parameters());
  const auto data = load_object(data_path).toGenericDict();
  lockstep::Ema ema(*net, {.decays = {0.5, 0.9}, .average_buffers = false});
  for (int step = 0; step < 6; ++step) {
    optimizer->zero_grad();
    at::mse_loss(net->forward(data.at("x").toTensor()[step]), data.at("y").toTensor()[step]).backward();
    optimizer->step();
    ema.update();
  }
  lockstep::save(ema.averaged_state(1), folder + "/average.pt");
  lockstep::save(ema.averaged_state(1), folder + "/average.safetensors");
  lockstep::Checkpointer checkpointer(folder + "/run", context.group());
  checkpointer.add("model", *net).add("ema", ema);
  checkpointer.save(6);
  checkpointer.finish();
}

/// Loads a file and saves it again.
void copy(const std::string& from, const std::string& to, bool mmap) {
  lockstep::save_object(load_object(from, {.mmap = mmap}), to);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.at(0) == "train") train(words);
    if (words[0] == "train-sharded") train_sharded(words);
    if (words[0] == "network") save_network(words.at(1));
    if (words[0] == "shared") save_shared(words.at(1));
    if (words[0] == "checkpoint") checkpoint(words.at(1));
    if (words[0] == "average") save_averages(words.at(1), words.at(2), words.at(3));
    if (words[0] == "copy") copy(words.at(1), words.at(2), false);
    if (words[0] == "copy-mapped") copy(words.at(1), words.at(2), true);
    if (words[0] == "flat") lockstep::save(lockstep::load(words.at(1)), words.at(2));
    if (words[0] == "hash") std::printf("%s\n", lockstep::hash(lockstep::load(words.at(1)).tensors).c_str());
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
