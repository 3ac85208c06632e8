// Trains layers of gpt_text, plain and with activations that backward computes again, in turns, and prints for both the
// median time of a step, the most memory beyond what there was before it, and the losses.
// bench_activation_checkpoint.py runs it beside activation_worker.py, which does the same in PyTorch.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include <malloc.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <lockstep/activation_checkpoint.h>

namespace {

struct Options {
  int layers = 12, width = 256, length = 128, batch = 8, steps = 5;
};

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int64_t width) : heads(8) {
    register_module("norm_1", norm_1 = torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    register_module("attention", attention = torch::nn::Linear(width, 3 * width));
    register_module("projection", projection = torch::nn::Linear(width, width));
    register_module("norm_2", norm_2 = torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    register_module("up", up = torch::nn::Linear(width, 4 * width));
    register_module("down", down = torch::nn::Linear(4 * width, width));
  }
  /// x [n, length, width]; returns the same.
  at::Tensor forward(at::Tensor x) {
    const int64_t n = x.size(0), length = x.size(1), width = x.size(2);
    const at::Tensor qkv = attention(norm_1(x)).view({n, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const at::Tensor seen = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0, /*is_causal=*/true);
    x = x + projection(seen.transpose(1, 2).reshape({n, length, width}));
    return x + down(at::gelu(up(norm_2(x))));
  }
  const int64_t heads;
  torch::nn::LayerNorm norm_1{nullptr}, norm_2{nullptr};
  torch::nn::Linear attention{nullptr}, projection{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Layer);

double status_mib(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(name + ":")) return std::stod(line.substr(name.size() + 1)) / 1024;
  return 0;
}

struct Figures {
  std::vector<double> ms, losses;
  double mib = 0;
};

void step(std::vector<Layer>& layers, const at::Tensor& x, bool again, torch::optim::SGD& optimizer, Figures& figures) {
  optimizer.zero_grad();
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << 5;  // the most memory is counted anew
  const double before = status_mib("VmRSS");
  const auto start = std::chrono::steady_clock::now();
  at::Tensor y = x;
  for (Layer& layer : layers) y = again ? lockstep::checkpoint(layer, y) : layer->forward(y);
  const at::Tensor loss = y.square().mean();
  loss.backward();
  figures.ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  figures.mib = std::max(figures.mib, status_mib("VmHWM") - before);
  figures.losses.push_back(loss.item<double>());
  optimizer.step();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"Trains layers, plain and with activations that are computed again."};
  app.add_option("--layers", options.layers);
  app.add_option("--width", options.width);
  app.add_option("--length", options.length);
  app.add_option("--batch", options.batch);
  app.add_option("--steps", options.steps);
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  nlohmann::ordered_json json;
  Figures all[2];
  std::vector<Layer> layers[2];
  std::vector<torch::optim::SGD> optimizers;
  for (auto& part : layers) {
    torch::manual_seed(1);
    std::vector<at::Tensor> parameters;
    for (int i = 0; i < options.layers; ++i) part.emplace_back(options.width);
    for (Layer& layer : part)
      for (const at::Tensor& parameter : layer->parameters()) parameters.push_back(parameter);
    optimizers.emplace_back(parameters, 0.01);
  }
  for (int i = 0; i <= options.steps; ++i)  // the first one is not counted
    for (const size_t again : {0, 1}) {
      torch::manual_seed(100 + i);
      const at::Tensor x = at::randn({options.batch, options.length, options.width});
      if (i == 1) all[again] = {};
      step(layers[again], x, again == 1, optimizers[again], all[again]);
    }
  for (const size_t again : {0, 1})
    json[again == 1 ? "checkpointed" : "plain"] = {
        {"ms", median(all[again].ms)}, {"mib", all[again].mib}, {"losses", all[again].losses}};
  std::printf("%s\n", json.dump().c_str());
}
