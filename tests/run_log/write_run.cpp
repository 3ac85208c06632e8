// For tests: a run that leaves everything a run log and a summary writer can write in the folder `argv[1]`, and what it
// wrote as tensors in written.safetensors. The last rank is late in every step.

#include <cmath>
#include <limits>
#include <thread>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace {

using torch::Tensor;

/// What Python writes a second time, by PyTorch's own SummaryWriter.
lockstep::NamedTensors tensors_to_show() {
  torch::manual_seed(5);
  return {{"normal", torch::randn({100, 30})},
          {"double", torch::randn({500}, torch::kDouble) * 1e-5},
          {"edges", torch::tensor({0.0, 1e-12, -1e-12, 1.1e-12, 1.0, -1.0, 1e19, -1e19}, torch::kDouble)},
          {"one", torch::full({3}, 0.5)},
          {"zeros", torch::zeros({4})},
          {"integers", torch::arange(-50, 1000)},
          {"rgb", torch::randint(0, 256, {3, 20, 31}, torch::kByte)},
          {"gray", torch::rand({1, 9, 9})},
          {"rgba", torch::rand({4, 5, 3}) * 1.4 - 0.2}};
}

void write_summaries(lockstep::SummaryWriter& writer) {
  torch::OrderedDict<std::string, Tensor> written;
  for (const auto& [name, tensor] : tensors_to_show()) {
    written.insert(name, tensor);
    if (tensor.dim() == 3)
      writer.add_image(name, tensor, 7);
    else
      writer.add_histogram(name, tensor, 7);
  }
  writer.add_image("columns", torch::ones({4, 6, 3}, torch::kByte) * 77, 7, "HWC");
  writer.add_image("flat", torch::zeros({4, 6}), 7, "HW");
  for (int step = 0; step < 1000; ++step) writer.add_scalar("curve", std::sin(step * 0.1), step);
  writer.add_scalar("not a number", std::nan(""), 1);
  writer.add_scalar("infinite", std::numeric_limits<double>::infinity(), 1);
  for (int step = 0; step < 3; ++step) writer.add_scalars("both", {{"a", step}, {"b", -step}}, step);
  writer.add_text("note", "**bold** <b>text</b> \xc3\xbc", 2);
  writer.add_hparams({{"lr", 0.5}, {"batch", 64}, {"nesterov", true}, {"optimizer", "sgd"}}, {{"accuracy", 0.75}},
                     "trial");
  if (writer.is_on()) lockstep::save(written, writer.log_dir() + "/written.safetensors");
}

void train(const lockstep::Context& context, lockstep::RunLog& log, int steps) {
  torch::nn::Sequential net(torch::nn::Linear(8, 64), torch::nn::ReLU(), torch::nn::Linear(64, 1));
  lockstep::DistributedDataParallel model(net, context, {.first_bucket_cap_mb = 1e-4, .bucket_cap_mb = 1e-3});
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  log.watch(model);
  for (int epoch = 0; epoch < 2; ++epoch) {
    log.epoch(epoch);
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      if (context.rank() + 1 == context.world_size()) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      const Tensor x = torch::randn({16, 8});
      const Tensor loss = (model(x).squeeze(1) - x.sum(1)).square().mean();
      loss.backward();
      optimizer.step();
      log.step(16, {{"train/loss", loss.item<double>()}, {"learning_rate", 0.01}});
    }
    log.scalar("valid/loss", 1.0 / (1 + epoch));
  }
}

}  // namespace

int main(int argc, char** argv) try {
  lockstep::Context context(argc, argv, {.seed = 1});
  const std::string folder = argc > 1 ? argv[1] : "run";
  const int steps = argc > 2 ? std::stoi(argv[2]) : 20;
  const int first_step = argc > 3 ? std::stoi(argv[3]) : 0;
  lockstep::RunLog log(context, {.folder = folder, .first_step = first_step});
  train(context, log, steps);
  write_summaries(log.tensorboard());
  lockstep::SummaryWriter everywhere(context, folder + "/everywhere", {.every_rank = true});
  everywhere.add_scalar("rank", context.rank());
  lockstep::SummaryWriter main_only(context, folder + "/main_only");
  main_only.add_scalar("rank", context.rank());
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
