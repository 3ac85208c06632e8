#pragma once

#include <optional>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

/// A small DCGAN whose both networks have batch norm: most of its time is in small layers.
class Gan {
 public:
  /// `context`: of the ranks that train it together, with synchronised batch norm; null: this process alone does.
  explicit Gan(lockstep::Context* context, torch::Dtype dtype = torch::kFloat) {
    torch::manual_seed(1);
    draw_ = make_generator();
    judge_ = make_discriminator();
    draw_->to(dtype);
    judge_->to(dtype);
    if (context != nullptr) {
      lockstep::DistributedDataParallelOptions options;
      options.buffers = lockstep::BufferPolicy::kNone;  // they are equal on all ranks
      for (torch::nn::Sequential* net : {&draw_, &judge_}) lockstep::convert_sync_batchnorm(**net, context->group());
      shared_draw_.emplace(draw_, *context, options);
      shared_judge_.emplace(judge_, *context, options);
    }
    draw_optimizer_.emplace(draw_->parameters(), 0.02);
    judge_optimizer_.emplace(judge_->parameters(), 0.02);
  }

  /// images [n, 1, 28, 28], noise [n, 64].
  void step(const torch::Tensor& images, const torch::Tensor& noise) {
    const torch::Tensor drawn = draw_->forward(noise);
    (loss(judge_->forward(images), 1) + loss(judge_->forward(drawn.detach()), 0)).backward();
    judge_optimizer_->step();
    judge_optimizer_->zero_grad();
    for (auto& parameter : judge_->parameters()) parameter.requires_grad_(false);
    loss(judge_->forward(drawn), 1).backward();
    for (auto& parameter : judge_->parameters()) parameter.requires_grad_(true);
    draw_optimizer_->step();
    draw_optimizer_->zero_grad();
  }

  torch::Tensor weights() const {
    return torch::cat({torch::nn::utils::parameters_to_vector(draw_->parameters()),
                       torch::nn::utils::parameters_to_vector(judge_->parameters())})
        .detach();
  }

 private:
  static torch::nn::Sequential make_generator() {
    using namespace torch::nn;  // NOLINT
    return Sequential(Linear(64, 64 * 7 * 7), Unflatten(UnflattenOptions(1, {64, 7, 7})), BatchNorm2d(64), ReLU(),
                      ConvTranspose2d(ConvTranspose2dOptions(64, 32, 4).stride(2).padding(1).bias(false)),
                      BatchNorm2d(32), ReLU(), ConvTranspose2d(ConvTranspose2dOptions(32, 1, 4).stride(2).padding(1)),
                      Tanh());
  }
  static torch::nn::Sequential make_discriminator() {
    using namespace torch::nn;  // NOLINT
    return Sequential(Conv2d(Conv2dOptions(1, 32, 4).stride(2).padding(1)), LeakyReLU(),
                      Conv2d(Conv2dOptions(32, 64, 4).stride(2).padding(1).bias(false)), BatchNorm2d(64), LeakyReLU(),
                      Flatten(), Linear(64 * 7 * 7, 1));
  }
  static torch::Tensor loss(const torch::Tensor& scores, double real) {
    return torch::nn::functional::binary_cross_entropy_with_logits(scores, torch::full_like(scores, real));
  }

  torch::nn::Sequential draw_{nullptr}, judge_{nullptr};
  std::optional<lockstep::DistributedDataParallel<torch::nn::Sequential>> shared_draw_, shared_judge_;
  std::optional<torch::optim::SGD> draw_optimizer_, judge_optimizer_;
};
