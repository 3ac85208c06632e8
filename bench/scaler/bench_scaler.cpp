// What a GradScaler adds to a step: two copies of a network take turns, one of them with a scaler.
//
//     lockstep run -n 2 -- build/bin/bench_scaler [--tiny] [--json FILE]
//
// The scale is a power of two and nothing overflows, so both have the same weights, which is seen to first.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

using Clock = std::chrono::steady_clock;
namespace nn = torch::nn;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

nn::Sequential make_network(const std::vector<int64_t>& widths) {
  torch::manual_seed(1);
  nn::Sequential network;
  for (size_t i = 0; i + 1 < widths.size(); ++i) network->push_back(nn::Linear(widths[i], widths[i + 1]));
  return network;
}

class Side {
 public:
  Side(const std::vector<int64_t>& widths, lockstep::Context& context, bool scales)
      : network_(make_network(widths)), replica_(network_, context), optimizer_(network_->parameters(), 1e-3) {
    if (scales) scaler_ = std::make_unique<lockstep::GradScaler>(context.group());
  }

  /// Microseconds.
  double step(const torch::Tensor& input) {
    const auto start = Clock::now();
    const torch::Tensor loss = replica_(input).square().mean();
    if (scaler_) {
      scaler_->scale(loss).backward();
      scaler_->step(optimizer_);
      scaler_->update();
    } else {
      loss.backward();
      optimizer_.step();
    }
    optimizer_.zero_grad();
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  }
  torch::Tensor weights() const { return nn::utils::parameters_to_vector(network_->parameters()); }

 private:
  nn::Sequential network_;
  lockstep::DistributedDataParallel<nn::Sequential> replica_;
  torch::optim::SGD optimizer_;
  std::unique_ptr<lockstep::GradScaler> scaler_;
};

nlohmann::ordered_json measure(const char* name, const std::vector<int64_t>& widths, int64_t batch_size, int rounds,
                               lockstep::Context& context) {
  Side plain(widths, context, false), scaled(widths, context, true);
  const torch::Tensor input = torch::randn({batch_size, widths.front()});
  std::vector<double> without, with;
  for (int round = -5; round < rounds; ++round) {
    const double one = plain.step(input), other = scaled.step(input);
    if (round == -1 && !torch::allclose(plain.weights(), scaled.weights(), 1e-6, 1e-7))
      throw lockstep::Error("the weights differ");
    if (round < 0) continue;
    without.push_back(one);
    with.push_back(other);
  }
  const double plain_us = median(without), scaled_us = median(with);
  if (context.is_main())
    std::printf("%s: a step of %d ranks takes %.0f us, with a scaler %.0f us: %.3f x\n", name, context.world_size(),
                plain_us, scaled_us, scaled_us / plain_us);
  return {{"model", name}, {"plain_us", plain_us}, {"scaled_us", scaled_us}, {"ratio", scaled_us / plain_us}};
}

}  // namespace

int main(int argc, char** argv) {
  bool tiny = false;
  std::string json;
  CLI::App app("What a GradScaler adds to a step");
  app.add_flag("--tiny", tiny, "3 steps of small models, for tests");
  app.add_option("--json", json, "File for the figures");
  CLI11_PARSE(app, argc, argv);
  try {
    lockstep::Context context(argc, argv, {.seed = 1});
    torch::set_num_threads(1);
    const int rounds = tiny ? 3 : 300;
    nlohmann::ordered_json rows;
    rows.push_back(measure("1,000 small parameters", std::vector<int64_t>(tiny ? 21 : 501, 16), 16, rounds, context));
    rows.push_back(measure("MLP", {784, 512, 512, 10}, 64, rounds, context));
    if (!json.empty() && context.is_main())
      std::ofstream(json) << nlohmann::ordered_json{{"ranks", context.world_size()}, {"rows", rows}}.dump(2) << '\n';
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_scaler: %s\n", error.what());
    return 1;
  }
}
