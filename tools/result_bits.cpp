#include "result_bits.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/environment.h"
#include "base/hash.h"

namespace lockstep {
namespace {

namespace F = torch::nn::functional;
using torch::Tensor;

/// Multiples of 1/512 in (-1, 1), without a generator, so that only the operators can differ.
Tensor numbers(std::vector<int64_t> sizes, int64_t salt, torch::Dtype dtype = torch::kFloat32) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  const Tensor index = torch::arange(count, torch::kInt64) * 7919 + salt * 104729;
  return ((index.remainder(1021) - 510).to(torch::kFloat64) / 512).reshape(sizes).to(dtype);
}

Tensor trained(std::vector<int64_t> sizes, int64_t salt, torch::Dtype dtype = torch::kFloat32) {
  return numbers(std::move(sizes), salt, dtype).requires_grad_();
}

std::string hash_of(const std::vector<Tensor>& results) {
  Hash hash;
  for (const Tensor& result : results) {
    const Tensor whole = result.detach().contiguous();
    hash.add(whole.const_data_ptr(), whole.nbytes());
  }
  return hash.digits();
}

/// The output and the gradients of its inputs.
std::string both_ways(const Tensor& output, const std::vector<Tensor>& inputs) {
  output.backward(numbers(output.sizes().vec(), 9, output.scalar_type()));
  std::vector<Tensor> results{output};
  for (const Tensor& input : inputs) results.push_back(input.grad());
  return hash_of(results);
}

std::string matmul(torch::Dtype dtype) {
  const Tensor a = trained({192, 320}, 1, dtype), b = trained({320, 256}, 2, dtype);
  return both_ways(a.matmul(b), {a, b});
}

std::string convolution() {
  const Tensor x = trained({4, 16, 28, 28}, 1), w = trained({32, 16, 3, 3}, 2);
  return both_ways(torch::conv2d(x, w, {}, 1, 1), {x, w});
}

std::string attention() {
  const Tensor q = trained({2, 4, 64, 32}, 1), k = trained({2, 4, 64, 32}, 2), v = trained({2, 4, 64, 32}, 3);
  return both_ways(torch::scaled_dot_product_attention(q, k, v, {}, 0.0, true), {q, k, v});
}

std::string layer_norm() {
  const Tensor x = trained({64, 384}, 1), w = trained({384}, 2), b = trained({384}, 3);
  return both_ways(torch::layer_norm(x, {384}, w, b), {x, w, b});
}

std::string batch_norm() {
  const Tensor x = trained({16, 24, 14, 14}, 1), w = trained({24}, 2), b = trained({24}, 3);
  return both_ways(torch::batch_norm(x, w, b, {}, {}, true, 0.1, 1e-5, false), {x, w, b});
}

std::string loss() {
  const Tensor x = trained({128, 100}, 1);
  return both_ways(torch::cross_entropy_loss(x, torch::arange(128, torch::kInt64).remainder(100)), {x});
}

std::string elementwise(const std::function<Tensor(const Tensor&)>& function) {
  const Tensor x = trained({10007}, 1);
  return both_ways(function(x), {x});
}

std::string sums() {
  const Tensor x = numbers({300, 1001}, 1);
  return hash_of({x.sum(), x.sum(0), x.sum(1), x.norm(), x.var(1)});
}

std::string random_numbers() {
  torch::manual_seed(7);
  return hash_of({torch::randn({1001}), torch::rand({1001}), torch::randperm(1001),
                  torch::dropout(numbers({1001}, 1), 0.3, true)});
}

const std::vector<std::pair<std::string, std::function<std::string()>>> kOperators = {
    {"matmul", [] { return matmul(torch::kFloat32); }},
    {"matmul of doubles", [] { return matmul(torch::kFloat64); }},
    {"matmul of bfloat16", [] { return matmul(torch::kBFloat16); }},
    {"convolution", convolution},
    {"attention", attention},
    {"layer norm", layer_norm},
    {"batch norm", batch_norm},
    {"cross entropy", loss},
    {"exp", [] { return elementwise([](const Tensor& x) { return x.exp(); }); }},
    {"tanh", [] { return elementwise([](const Tensor& x) { return x.tanh(); }); }},
    {"gelu", [] { return elementwise([](const Tensor& x) { return torch::gelu(x); }); }},
    {"sums", sums},
    {"random numbers", random_numbers},
};

}  // namespace

nlohmann::json result_bits() {
  const int threads_before = at::get_num_threads();
  nlohmann::json operators = nlohmann::json::object(), differ = nlohmann::json::array();
  for (const auto& [name, run] : kOperators) {
    at::set_num_threads(1);
    operators[name] = run();
    at::set_num_threads(2);
    if (run() != operators[name]) differ.push_back(name);
  }
  at::set_num_threads(threads_before);
  nlohmann::json found = {{"threads", 1}, {"operators", operators}, {"other_bits_with_two_threads", differ}};
  const auto environment = Environment::from_process();
  const auto text_of = [](const std::optional<std::string>& value) {
    return value ? nlohmann::json(*value) : nlohmann::json();
  };
  found["ATEN_CPU_CAPABILITY"] = text_of(environment.aten_cpu_capability);
  found["MKL_CBWR"] = text_of(environment.mkl_cbwr);
  found["ONEDNN_MAX_CPU_ISA"] = text_of(environment.onednn_max_cpu_isa);
  return found;
}

}  // namespace lockstep
