// Three steps whose gradients are a text, for whoever looks at what goes over the wire: marked_gradients.
#include <cstdio>
#include <cstring>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace {

/// `text` again and again, as numbers.
torch::Tensor numbers_of(const std::string& text, int64_t count) {
  std::string bytes;
  while (bytes.size() < static_cast<size_t>(count) * sizeof(float)) bytes += text;
  const torch::Tensor numbers = torch::empty({count});
  std::memcpy(numbers.mutable_data_ptr<float>(), bytes.data(), static_cast<size_t>(count) * sizeof(float));
  return numbers;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(argc, argv, [&] {
    lockstep::Context context({.seed = 1});
    torch::nn::Linear layer(torch::nn::LinearOptions(64, 64).bias(false));
    lockstep::DistributedDataParallel model(layer, context);
    torch::optim::SGD optimizer(layer->parameters(), torch::optim::SGDOptions(1e-12));
    const torch::Tensor mark = numbers_of("MARKED_GRADIENT_", 64 * 64).view({64, 64});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      // The gradient of sum(W mark^T) over the identity is the mark.
      (model(torch::eye(64)) * mark.t()).sum().backward();
      if (!torch::equal(layer->weight.grad(), mark)) throw lockstep::Error("the gradient is not the mark");
      optimizer.step();
    }
    if (context.is_main()) std::puts("the gradients were the mark");
    return 0;
  });
}
