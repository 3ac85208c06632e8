// Steps of optimizers in C++, one at a time, for bench_optim.py: it writes commands, this program answers each with a
// line.
//
//     bench_optim THREADS SHAPE...
//
// A parameter a shape, such as 2048x784 or 10. "make libtorch|lockstep" builds an AdamW over closed formulas, "step"
// steps it and answers with milliseconds, "sum" answers with the sum and the sum of squares of all parameters.

#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <lockstep/error.h>
#include <lockstep/zero_redundancy_optimizer.h>
#include <torch/torch.h>

namespace {

using Clock = std::chrono::steady_clock;
using torch::optim::AdamW;

using Shape = std::vector<int64_t>;

Shape shape_of(const std::string& text) {
  Shape shape;
  std::stringstream stream(text);
  for (std::string size; std::getline(stream, size, 'x');) shape.push_back(std::stol(size));
  return shape;
}

/// As in bench_optim.py.
torch::Tensor formula(const Shape& shape, int key) {
  const torch::Tensor value = torch::arange(c10::multiply_integers(shape), torch::kDouble) * 0.6180339887498949 +
                              static_cast<double>(key) * 0.3771;
  return (value - value.floor() - 0.5).reshape(shape).to(torch::kFloat);
}

class Contestant {
 public:
  Contestant(const std::string& system, const std::vector<Shape>& shapes) {
    for (const Shape& shape : shapes) {
      const int key = static_cast<int>(parameters_.size());
      parameters_.push_back(formula(shape, key).requires_grad_());
      parameters_.back().mutable_grad() = formula(shape, 1000 + key);
    }
    const auto options = torch::optim::AdamWOptions(1e-3).weight_decay(0.01);
    if (system == "lockstep")
      optimizer_ = std::make_unique<lockstep::ZeroRedundancyOptimizer<AdamW>>(parameters_, options);
    else if (system == "libtorch")
      optimizer_ = std::make_unique<AdamW>(parameters_, options);
    else
      throw lockstep::Error("no system is named " + system);
  }
  double step() {
    const auto start = Clock::now();
    optimizer_->step();
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  }
  std::pair<double, double> sums() const {
    double sum = 0, squares = 0;
    for (const torch::Tensor& parameter : parameters_) {
      sum += parameter.sum(torch::kDouble).item<double>();
      squares += parameter.detach().to(torch::kDouble).square().sum().item<double>();
    }
    return {sum, squares};
  }

 private:
  std::vector<torch::Tensor> parameters_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) throw lockstep::Error("the number of threads and shapes are needed");
  torch::set_num_threads(std::stoi(argv[1]));
  std::vector<Shape> shapes;
  for (int i = 2; i < argc; ++i) shapes.push_back(shape_of(argv[i]));
  std::unique_ptr<Contestant> contestant;
  for (std::string command; std::cin >> command;) {
    if (command == "make") {
      std::string system;
      std::cin >> system;
      contestant.reset();
      contestant = std::make_unique<Contestant>(system, shapes);
      std::printf("made\n");
    } else if (!contestant) {
      throw lockstep::Error(command + " before make");
    } else if (command == "step") {
      std::printf("%.6f\n", contestant->step());
    } else if (command == "sum") {
      const auto [sum, squares] = contestant->sums();
      std::printf("%.17g %.17g\n", sum, squares);
    } else {
      throw lockstep::Error("no command is named " + command);
    }
    std::fflush(stdout);
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench_optim: %s\n", error.what());
  return 1;
}
