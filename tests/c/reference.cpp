// What examples/c and its relatives in other languages must compute, by the C++ library: the same sums, and the same
// network, trained by its own code.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
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

/// What examples/c/sharded_adamw.c trains.
uint32_t plane(const lockstep::Context& context) {
  constexpr size_t kWidth = 64, kBatch = 128;
  auto state = static_cast<uint32_t>(context.rank());
  std::vector<float> inputs(kBatch * kWidth);
  for (float& value : inputs) value = uniform(state);
  const at::Tensor weights = torch::zeros({static_cast<int64_t>(kWidth)}).requires_grad_();
  lockstep::DistributedDataParallel model(lockstep::NamedTensors{{"weights", weights}}, context);
  lockstep::ZeroRedundancyOptimizer optimizer(model, torch::optim::AdamWOptions(0.1));
  for (size_t step = 1; step <= kSteps; ++step) {
    const at::Tensor gradient = torch::zeros_like(weights);
    const auto *w = weights.const_data_ptr<float>(), *x = inputs.data();
    for (size_t s = 0; s < kBatch; ++s, x += kWidth) {
      float out = 0, target = 0;
      for (size_t i = 0; i < kWidth; ++i) {
        out += w[i] * x[i];
        if (i < kWidth / 2) target += x[i];
      }
      const float slope = 2 * (out - target) / kBatch;
      for (size_t i = 0; i < kWidth; ++i) gradient.mutable_data_ptr<float>()[i] += slope * x[i];
    }
    optimizer.zero_grad();
    (weights * gradient).sum().backward();  // whose gradient it is
    static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options())
        .lr(0.1 * (kSteps + 1 - step) / kSteps);
    optimizer.step();
  }
  return hash_of(weights.const_data_ptr<float>(), kWidth);
}

constexpr int64_t kCount = 70001;

uint16_t& bits_at(const at::Tensor& tensor, int64_t i) { return static_cast<uint16_t*>(tensor.mutable_data_ptr())[i]; }

/// As tests/c/sharded.c and sharded_typed.c make them up; those of 16 bits are -0.5 to -0.25 and 0.25 to 0.5.
at::Tensor random(uint32_t seed, at::ScalarType dtype) {
  const at::Tensor values = torch::empty({kCount}, dtype);
  for (int64_t i = 0; i < kCount; ++i) {
    const float value = uniform(seed);
    const uint32_t bits = seed >> 16;
    if (dtype == at::kFloat)
      values.mutable_data_ptr<float>()[i] = value;
    else if (dtype == at::kDouble)
      values.mutable_data_ptr<double>()[i] = value;
    else
      bits_at(values, i) =
          static_cast<uint16_t>(dtype == at::kHalf ? (bits & 0x83FF) | 0x3400 : (bits & 0x807F) | 0x3E80);
  }
  return values;
}

uint32_t hash_of(const at::Tensor& values) {
  if (values.element_size() > 2)
    return hash_of(static_cast<const float*>(values.const_data_ptr()), values.nbytes() / sizeof(float));
  uint32_t hash = 2166136261U;
  for (int64_t i = 0; i < values.numel(); ++i) hash = (hash ^ bits_at(values, i)) * 16777619U;
  return hash;
}

/// What tests/c/sharded.c and sharded_typed.c step: made-up gradients, at a falling learning rate.
template <typename Options>
void print_stepped(const std::string& name, const lockstep::Context& context, Options options, at::ScalarType dtype,
                   bool masters) {
  const at::Tensor weights = random(42, dtype).requires_grad_();
  lockstep::DistributedDataParallel model(lockstep::NamedTensors{{"weights", weights}}, context);
  lockstep::ZeroRedundancyOptimizer optimizer(model, options.weight_decay(1e-2), {.master_weights = masters});
  const double lr = options.lr();
  for (int step = 1; step <= 5; ++step) {
    optimizer.zero_grad();
    (weights * random(static_cast<uint32_t>(1000 * step + context.rank()), dtype)).sum().backward();
    static_cast<Options&>(optimizer.param_groups()[0].options()).lr(lr / step);
    optimizer.step();
  }
  if (context.rank() == 0) std::printf("%s %08x over %d ranks\n", name.c_str(), hash_of(weights), context.world_size());
}

void print_all_stepped(const lockstep::Context& context, const std::string& suffix, at::ScalarType dtype,
                       bool masters) {
  using namespace torch::optim;
  const auto print = [&](const char* name, const auto& options) {
    print_stepped(name + suffix, context, options, dtype, masters);
  };
  print("sgd", SGDOptions(0.1));
  print("momentum", SGDOptions(0.1).momentum(0.9).dampening(0.5));
  print("nesterov", SGDOptions(0.1).momentum(0.9).nesterov(true));
  print("adam", AdamOptions(0.01).betas({0.9, 0.99}).amsgrad(true));
  print("adamw", AdamWOptions(0.01).betas({0.9, 0.99}));
}

void print_all_typed(const lockstep::Context& context) {
  print_all_stepped(context, "-float32", at::kFloat, /*masters=*/false);
  print_all_stepped(context, "-float64", at::kDouble, /*masters=*/false);
  for (const bool masters : {false, true}) {
    print_all_stepped(context, masters ? "-float16-master" : "-float16", at::kHalf, masters);
    print_all_stepped(context, masters ? "-bfloat16-master" : "-bfloat16", at::kBFloat16, masters);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const lockstep::Context context({.announce = false});
  if (argc > 1) {
    if (argv[1] == std::string("typed"))
      print_all_typed(context);
    else
      print_all_stepped(context, "", at::kFloat, /*masters=*/false);
    return 0;
  }
  const uint32_t sum = sums(context), weights = trained(context), flat = plane(context);
  if (context.rank() == 0)
    std::printf("sums %08x over %d ranks\nweights %08x over %d ranks\nplane %08x over %d ranks\n", sum,
                context.world_size(), weights, context.world_size(), flat, context.world_size());
}
