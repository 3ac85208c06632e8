// What examples/c and its relatives in other languages must compute, by the C++ library: the same sums, and the same
// network, trained by its own code.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace {

float uniform(uint32_t& state) {
  state = state * 1664525U + 1013904223U;
  return static_cast<float>(state >> 8) / 16777216.0F - 0.5F;
}

uint32_t hash_of(const float* values, size_t count) {
  uint32_t hash = 2166136261U;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    hash = (hash ^ bits) * 16777619U;
  }
  return hash;
}

uint32_t sums(const lockstep::Context& context) {
  auto state = static_cast<uint32_t>(context.rank());
  std::vector<float> values(1000);
  for (float& value : values) value = uniform(state);
  context.group().all_reduce(torch::from_blob(values.data(), {1000}));
  return hash_of(values.data(), values.size());
}

constexpr size_t kInputs = 8, kHidden = 16, kSamples = 64, kSteps = 200, kWeights = kHidden * (kInputs + 2) + 1;

/// Weights lie as hidden rows, hidden biases, output row, output bias.
void add_gradient(const std::vector<float>& weights, const float* x, std::vector<float>& gradient) {
  const float *biases = &weights[kHidden * kInputs], *outer = biases + kHidden;
  std::vector<float> hidden(kHidden);
  float out = outer[kHidden];
  for (size_t h = 0; h < kHidden; ++h) {
    float sum = biases[h];
    for (size_t i = 0; i < kInputs; ++i) sum += weights[h * kInputs + i] * x[i];
    hidden[h] = std::max(sum, 0.0F);
    out += outer[h] * hidden[h];
  }
  const float slope = 2 * (out - (x[0] * x[1] + x[2])) / kSamples;
  float* row = gradient.data();
  for (size_t h = 0; h < kHidden; ++h) {
    row[kHidden * (kInputs + 1) + h] += slope * hidden[h];
    if (hidden[h] <= 0) continue;
    row[kHidden * kInputs + h] += slope * outer[h];
    for (size_t i = 0; i < kInputs; ++i) row[h * kInputs + i] += slope * outer[h] * x[i];
  }
  row[kWeights - 1] += slope;
}

uint32_t trained(const lockstep::Context& context) {
  auto state = static_cast<uint32_t>(context.rank());
  std::vector<float> inputs(kSamples * kInputs), weights(kWeights), gradient(kWeights);
  for (float& value : inputs) value = uniform(state);
  state = 42;
  for (float& value : weights) value = uniform(state);
  for (size_t step = 0; step < kSteps; ++step) {
    std::fill(gradient.begin(), gradient.end(), 0.0F);
    for (size_t s = 0; s < kSamples; ++s) add_gradient(weights, &inputs[s * kInputs], gradient);
    context.group().all_reduce(torch::from_blob(gradient.data(), {kWeights}), lockstep::ReduceOp::kMean);
    for (size_t i = 0; i < kWeights; ++i) weights[i] -= 0.1F * gradient[i];
  }
  return hash_of(weights.data(), weights.size());
}

}  // namespace

int main() {
  const lockstep::Context context({.announce = false});
  const uint32_t sum = sums(context), weights = trained(context);
  if (context.rank() == 0)
    std::printf("sums %08x over %d ranks\nweights %08x over %d ranks\n", sum, context.world_size(), weights,
                context.world_size());
}
