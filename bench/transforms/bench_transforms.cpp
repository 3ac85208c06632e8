// How fast the transforms of CIFAR training are (crop with padding, flip, normalise, batches of 128): on bytes,
// normalised last; on floats, normalised first; and the same by LibTorch's operators, image by image.
//
//     build/bin/bench_transforms
//
// All three draw the same numbers, and what they make is compared before it is timed. One thread, as on a loader's
// worker; rounds are interleaved, medians are printed.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include <lockstep/datasets.h>
#include <lockstep/error.h>
#include <lockstep/transforms.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

using lockstep::datasets::CIFAR10;
using namespace lockstep::transforms;

/// Random pixels in CIFAR's shape.
class Pixels : public lockstep::Dataset {
 public:
  explicit Pixels(int64_t size) : images_(torch::randint(256, {size, 3, 32, 32}, torch::kByte)) {}
  int64_t size() const override { return images_.size(0); }
  lockstep::Batch get(at::ArrayRef<int64_t> indices) const override {
    return {.data = images_.index_select(0, torch::tensor(indices)), .target = torch::tensor(indices)};
  }

 private:
  torch::Tensor images_;
};

torch::Tensor crop_by_operators(const torch::Tensor& images, at::ArrayRef<uint64_t> seeds) {
  std::vector<torch::Tensor> parts;
  for (size_t i = 0; i < seeds.size(); ++i) {
    Random random(seeds[i]);
    const int64_t top = random.below(9), left = random.below(9);
    const torch::Tensor padded = at::constant_pad_nd(images[static_cast<int64_t>(i)], {4, 4, 4, 4});
    parts.push_back(padded.slice(1, top, top + 32).slice(2, left, left + 32));
  }
  return torch::stack(parts);
}

torch::Tensor flip_by_operators(const torch::Tensor& images, at::ArrayRef<uint64_t> seeds) {
  std::vector<torch::Tensor> parts;
  for (size_t i = 0; i < seeds.size(); ++i) {
    const torch::Tensor image = images[static_cast<int64_t>(i)];
    parts.push_back(Random(seeds[i]).uniform() < 0.5 ? image.flip(2) : image);
  }
  return torch::stack(parts);
}

torch::Tensor normalize_by_operators(const torch::Tensor& images, at::ArrayRef<uint64_t>) {
  static const torch::Tensor mean = torch::tensor(at::ArrayRef<float>(CIFAR10::kMean)).view({3, 1, 1});
  static const torch::Tensor deviation =
      torch::tensor(at::ArrayRef<float>(CIFAR10::kStandardDeviation)).view({3, 1, 1});
  return (images.to(torch::kFloat) / 255 - mean) / deviation;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("How fast the transforms of CIFAR training are");
  int rounds = 30;
  bool tiny = false;
  std::string json;
  app.add_option("--rounds", rounds, "Interleaved rounds of 10 batches")->capture_default_str();
  app.add_option("--json", json, "File for the figures");
  app.add_flag("--tiny", tiny, "2 rounds, for tests");
  CLI11_PARSE(app, argc, argv);
  if (tiny) rounds = 2;
  try {
    torch::set_num_threads(1);
    torch::manual_seed(1);
    constexpr int64_t kBatch = 128, kBatches = 10;
    const auto pixels = std::make_shared<const Pixels>(kBatch * kBatches);
    const RandomCrop crop(32, {.padding = 4});
    const RandomHorizontalFlip flip;
    const Normalize normalize(CIFAR10::kMean, CIFAR10::kStandardDeviation);
    const Normalize to_float({0.f}, {1.f});
    // Crop and flip stand in places 0 and 1 of each chain, so that all draw the same.
    std::map<std::string, lockstep::Transformed> chains;
    chains.emplace("bytes", lockstep::Transformed(pixels, {crop, flip, normalize}));
    chains.emplace("operators",
                   lockstep::Transformed(pixels, {crop_by_operators, flip_by_operators, normalize_by_operators}));
    chains.emplace("floats", lockstep::Transformed(pixels, {[&](at::Tensor images, at::ArrayRef<uint64_t> seeds) {
                                                              return crop(to_float(std::move(images), seeds), seeds);
                                                            },
                                                            flip, normalize}));
    std::vector<int64_t> indices(kBatch);
    std::map<std::string, std::vector<double>> seconds;
    for (int round = -1; round < rounds; ++round)
      for (const auto& [name, chain] : chains) {
        double taken = 0;
        for (int64_t batch = 0; batch < kBatches; ++batch) {
          std::iota(indices.begin(), indices.end(), batch * kBatch);
          lockstep::Draw draw{.seed = 5, .epoch = 2};
          const torch::Tensor images = chain.draw(indices, draw).data;
          taken += draw.transform_seconds;
          lockstep::Draw again{.seed = 5, .epoch = 2};
          if (round < 0 && !at::allclose(images, chains.at("operators").draw(indices, again).data, 1e-6, 1e-6))
            throw lockstep::Error(name + " makes other images than the operators do");
        }
        if (round >= 0) seconds[name].push_back(taken);
      }
    nlohmann::ordered_json figures = {{"rounds", rounds}};
    for (const auto& [name, each] : seconds) {
      const double rate = kBatch * kBatches / median(each);
      std::printf("%-10s %9.0f images/s  (%.1f us an image)\n", name.c_str(), rate, 1e6 / rate);
      figures["images_per_second"][name] = rate;
    }
    if (!json.empty()) std::ofstream(json) << figures.dump(2) << '\n';
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_transforms: %s\n", error.what());
    return 1;
  }
}
