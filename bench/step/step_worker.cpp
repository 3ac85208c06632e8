// A rank that trains one model with one system, in C++: step_job.h has the commands.

#include <chrono>
#include <cstdio>
#include <ctime>
#include <iomanip>
#include <optional>
#include <sstream>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "models.h"
#include "peak_memory.h"
#include "synchronizer.h"
#include "workers/serve.h"

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

class Trainer {
 public:
  Trainer(std::string system, const std::string& model, std::string optimizer, Group group, std::string folder,
          int batches)
      : system_(std::move(system)),
        folder_(std::move(folder)),
        group_(std::move(group)),
        model_(make_model(model)),
        batch_(batches > 1 ? make_whole_batch(model, batches) : make_batch(model, group_.rank())),
        optimizer_name_(std::move(optimizer)) {}

  std::string answer(const std::string& command) {
    std::istringstream in(command);
    std::string verb;
    size_t warm = 0, steps = 0;
    in >> verb;
    if (verb == "attach") return attach_now();
    if (verb == "check" && in >> steps) return check(steps);
    if (verb == "peak") return peak();
    if (verb == "watch") return watch();
    if (verb == "sent") return "sent " + std::to_string(synchronizer_->sent_bytes());
    if (verb == "time" && in >> warm >> steps) return time(warm, steps);
    return "wrong command: " + command;
  }

 private:
  std::string attach_now() {
    group_.barrier();
    const auto start = Clock::now();
    synchronizer_ = attach(system_, model_, group_, folder_);
    const double taken = milliseconds_since(start);
    optimizer_ = synchronizer_->make_optimizer(optimizer_name_, parameters_);
    return "attached " + std::to_string(taken);
  }

  double step() {
    // As Python's zero_grad does it. C++'s detaches gradients first, which c10d::Reducer's views refuse.
    for (auto& group : optimizer_->param_groups())
      for (at::Tensor& parameter : group.params()) parameter.mutable_grad().reset();
    synchronizer_->before_forward();
    const at::Tensor loss = model_->loss(batch_.data, batch_.target);
    synchronizer_->after_forward(loss);
    loss.backward();
    optimizer_->step();
    synchronizer_->after_step();
    return loss.item<double>();
  }

  std::string check(size_t steps) {
    std::ostringstream text;
    text << std::setprecision(10) << "losses";
    for (size_t i = 0; i < steps; ++i) text << ' ' << step();
    text << " weights " << weights();
    return text.str();
  }

  std::string peak() {
    const double peak_mib = memory_->stop();
    memory_.reset();
    return "peak_mib " + std::to_string(peak_mib);
  }

  /// The next `peak` is since now.
  std::string watch() {
    memory_.reset();
    memory_.emplace();
    return "watching";
  }

  /// A hash of the bits of all parameters (FNV-1a of 64 bits, word by word).
  std::string weights() {
    uint64_t hash = 14695981039346656037u;
    for (const at::Tensor& parameter : synchronizer_->values(parameters_)) {
      const at::Tensor dense = parameter.detach().contiguous();
      const auto* words = static_cast<const uint32_t*>(dense.const_data_ptr());
      for (size_t i = 0; i < dense.nbytes() / sizeof(uint32_t); ++i) hash = (hash ^ words[i]) * 1099511628211u;
    }
    return std::to_string(hash);
  }

  std::string time(size_t warm, size_t steps) {
    std::ostringstream text;
    text << "times";
    for (size_t i = 0; i < warm; ++i) step();
    const std::clock_t processor = std::clock();
    for (size_t i = 0; i < steps; ++i) {
      const auto start = Clock::now();
      step();
      text << ' ' << milliseconds_since(start);
    }
    text << " cpu "
         << static_cast<double>(std::clock() - processor) * 1e3 / CLOCKS_PER_SEC / static_cast<double>(steps);
    return text.str();
  }

  const std::string system_;
  const std::string folder_;
  const Group group_;
  const std::shared_ptr<Model> model_;
  const Batch batch_;
  std::vector<at::Tensor> parameters_ = model_->parameters();
  std::optional<PeakMemory> memory_{std::in_place};  ///< from the start to `peak`
  const std::string optimizer_name_;
  std::unique_ptr<Synchronizer> synchronizer_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

/// 1 unless it is given.
int number(int argc, char** argv, const std::string& name) {
  const std::string given = argument(argc, argv, name);
  return given.empty() ? 1 : std::stoi(given);
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  using namespace lockstep::bench;  // NOLINT
  try {
    lockstep::Context context(argc, argv, {.announce = false});
    torch::set_num_threads(number(argc, argv, "--threads"));
    const std::string socket = argument(argc, argv, "--socket");
    Trainer trainer(argument(argc, argv, "--system"), argument(argc, argv, "--model"),
                    argument(argc, argv, "--optimizer"), context.group(), socket.substr(0, socket.rfind('/')),
                    number(argc, argv, "--batches"));
    return serve_commands(argc, argv, context.rank(), "LibTorch " TORCH_VERSION,
                          [&](const std::string& command) { return trainer.answer(command); });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "step_worker: %s\n", error.what());
    return 1;
  }
}
