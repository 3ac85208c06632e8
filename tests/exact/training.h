#pragma once

#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "support/ranks.h"
#include "support/temporary_folder.h"

// A training whose result is a text: the hash of the parameters, and the bits of every virtual rank's losses. Equal
// texts mean equal bits.

namespace lockstep::exact {

enum class Kind { kMlp, kResNet, kTransformer };

struct Case {
  std::string name;
  int virtual_ranks;
  Kind kind = Kind::kMlp;
  at::ScalarType dtype = at::kFloat;
  int accumulate = 1;
  bool weighted = false, unused = false, adamw = false, sharded = false, ema = false, clip = false, skip = false;
  bool keeps_gradients = false;  ///< zero_grad() only every third step
  GradientReduction reduction = GradientReduction::kMean;
  CommHookPtr (*hook)() = nullptr;
  int steps = 20;
  std::string backend = {};
};
inline void PrintTo(const Case& one, std::ostream* out) { *out << one.name << " V=" << one.virtual_ranks; }

/// Samples of numbers that depend on the index alone.
struct Waves : Dataset {
  explicit Waves(std::vector<int64_t> shape_) : shape(std::move(shape_)) {}
  int64_t size() const override { return 4000; }
  Batch get(at::ArrayRef<int64_t> indices) const override {
    std::vector<at::Tensor> data, target;
    for (const int64_t index : indices) {
      const int64_t count = c10::multiply_integers(shape);
      data.push_back(torch::sin(torch::arange(count, torch::kFloat) * (0.37 + 0.01 * static_cast<double>(index % 97)) +
                                static_cast<double>(index))
                         .view(shape));
      target.push_back(torch::scalar_tensor(index % 5, torch::kLong));
    }
    return {.data = torch::stack(data), .target = torch::stack(target)};
  }
  std::vector<int64_t> shape;
};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(Kind kind_) : kind(kind_) {
    using namespace torch::nn;  // NOLINT
    if (kind == Kind::kMlp) {
      body = Sequential(Linear(12, 33), ReLU(), Dropout(0.2), Linear(33, 17), Tanh());
    } else if (kind == Kind::kResNet) {
      body = Sequential(Conv2d(Conv2dOptions(2, 6, 3).padding(1).bias(false)), BatchNorm2d(6), ReLU(), Dropout(0.1),
                        Conv2d(Conv2dOptions(6, 2, 3).padding(1).bias(false)), BatchNorm2d(2));
    } else {
      body = Sequential(TransformerEncoderLayer(TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.1)));
    }
    register_module("body", body);
    head = register_module("head", Linear(features(), 5));
    spare = register_module("spare", Linear(features(), 5));
  }
  int64_t features() const { return kind == Kind::kMlp ? 17 : kind == Kind::kResNet ? 2 * 6 * 6 : 8; }
  static std::vector<int64_t> shape_of(Kind kind) {
    return kind == Kind::kMlp      ? std::vector<int64_t>{12}
           : kind == Kind::kResNet ? std::vector<int64_t>{2, 6, 6}
                                   : std::vector<int64_t>{5, 8};
  }
  at::Tensor forward(const at::Tensor& x, bool uses_spare = false) {
    at::Tensor hidden;
    if (kind == Kind::kMlp)
      hidden = body->forward(x);
    else if (kind == Kind::kResNet)
      hidden = torch::relu(body->forward(x) + x).flatten(1);
    else
      hidden = body->forward(x.transpose(0, 1).contiguous()).mean(0);
    return uses_spare ? spare(hidden) : head(hidden);
  }
  const Kind kind;
  torch::nn::Sequential body;
  torch::nn::Linear head{nullptr}, spare{nullptr};
};
TORCH_MODULE(Net);

inline std::string bits_of(double value) {
  std::ostringstream text;
  text << std::hexfloat << value;
  return text.str();
}

/// What one run leaves, on every rank the same.
class Training {
 public:
  Training(Context& context, const Case& one)
      : context_(context),
        one_(one),
        net_(made(one)),
        model_(net_, context, {.first_bucket_cap_mb = 0.0005, .bucket_cap_mb = 0.001, .reduction = reduction()}),
        loader_(Waves(NetImpl::shape_of(one.kind)), context,
                {.batch_size = 3, .accumulate = one.accumulate, .shuffle = true, .drop_last = true, .workers = 1}) {
    if (one.hook != nullptr) model_.register_comm_hook(one.hook());
    const auto parameters = net_->parameters();
    if (one.sharded)
      optimizer_ = std::make_unique<ZeroRedundancyOptimizer<torch::optim::AdamW>>(
          model_, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
    else if (one.adamw)
      optimizer_ = std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-2));
    else
      optimizer_ = std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
    if (one.ema) ema_.emplace(*net_);
  }

  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  Net& net() { return net_; }
  DataLoader& loader() { return loader_; }
  DistributedDataParallel<Net>& model() { return model_; }

  /// These steps were done before a checkpoint.
  void go_on_from(int step) { step_ = step; }

  /// Runs until `steps` steps are done in all.
  void run(int steps, const std::function<void(int step)>& after_step = nullptr) {
    std::optional<Accumulation> accumulation;
    if (one_.accumulate > 1) accumulation.emplace(model_.accumulate(one_.accumulate));
    const auto block = context_.virtual_block();
    int micro = 0;
    while (step_ < steps) {
      for (auto& [data, target] : loader_) {
        const int v = block.first + micro / one_.accumulate;
        ++micro;
        backward(v, data, target);
        if (!model_.step_complete()) continue;
        micro = 0;
        finish_step();
        if (after_step) after_step(step_);
        if (step_ == steps) break;
      }
    }
  }

  std::string result() {
    std::string text;
    for (const std::string& rank : context_.group().all_gather_bytes(losses_)) text += rank;
    std::vector<std::string> lines;
    std::istringstream all(text);
    for (std::string line; std::getline(all, line);) lines.push_back(line);
    std::sort(lines.begin(), lines.end());
    text.clear();
    for (const std::string& line : lines) text += line + '\n';
    if (ema_) text += "averages " + hash(ema_->averaged_state()) + '\n';
    text += "parameters " + hash(state_dict(*net_)) + "\nskipped " + std::to_string(model_.skipped_steps()) + '\n';
    return text;
  }

 private:
  static Net made(const Case& one) {
    Net net(one.kind);
    net->to(one.dtype);
    return net;
  }
  GradientReduction reduction() const { return one_.weighted ? GradientReduction::kWeightedMean : one_.reduction; }

  void backward(int v, const at::Tensor& data, const at::Tensor& target) {
    if (one_.weighted) model_.set_weight(1 + (v * 7 + step_) % 4);
    if (one_.skip && (step_ * 5 + v) % 4 == 0) {
      (void)model_(data.to(one_.dtype));  // its batch norms must not count
      model_.skip_step();
      return;
    }
    const bool spare = one_.unused && (step_ % 5 == 4 || (v + step_) % 3 == 0);
    const at::Tensor loss = torch::cross_entropy_loss(model_(data.to(one_.dtype), spare).to(at::kFloat), target);
    loss.backward();
    losses_ += std::to_string(1000 + step_) + ' ' + std::to_string(100 + v) + ' ' + bits_of(loss.item<double>()) + '\n';
  }

  void finish_step() {
    if (one_.clip) {
      const double norm = model_.clip_grad_norm(0.1);
      if (context_.is_main()) losses_ += std::to_string(1000 + step_) + " norm " + bits_of(norm) + '\n';
    }
    optimizer_->step();
    if (!one_.keeps_gradients || step_ % 3 == 2) optimizer_->zero_grad();
    if (ema_) ema_->update();
    ++step_;
  }

  Context& context_;
  const Case one_;
  Net net_;
  DistributedDataParallel<Net> model_;
  DataLoader loader_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<Ema> ema_;
  std::string losses_;
  int step_ = 0;
};

/// The text of a run on `ranks` ranks.
inline std::string run_on(int ranks, const Case& one,
                          const std::function<std::string(Context&, Training&)>& body = nullptr) {
  TemporaryFolder folder;
  const std::string path = (folder.path() / "result").string();
  testing::run_ranks(
      ranks,
      [&](Context& context) {
        Training training(context, one);
        if (!body) training.run(one.steps);
        const std::string text = body ? body(context, training) : training.result();
        if (context.is_main()) std::ofstream(path) << text;
      },
      std::chrono::seconds(120),
      {.seed = 7, .virtual_ranks = one.virtual_ranks, .backend = ranks > 1 ? one.backend : "", .announce = false});
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace lockstep::exact
