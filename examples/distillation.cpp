// A small network learns from a large one: a teacher learns a task, and a student with a two-hundredth of its
// parameters learns what the teacher says of points that nobody has labelled.
//
//     lockstep run -n 2 -- build/bin/distillation
//
// prints lines such as
//
//     teacher          100101 numbers  loss 0.2118  unseen points told 0.99
//     student alone    405 numbers  loss 0.1712  unseen points told 0.62
//     student, taught  405 numbers  loss 2.9098  unseen points told 0.92
//
// Points to copy:
//
// - The teacher is no replica while it teaches: its weights are equal on all ranks since its own training, and no
//   gradient flows into it. So it costs no message, and no memory but its own. If every rank reads a teacher from a
//   file instead, assert_equal() tells whether they have read the same.
// - It is in evaluation mode, and called under NoGradGuard.
// - Fresh points are drawn from the samples' seeds, so they do not depend on the number of ranks.

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

namespace nn = torch::nn;

struct Options {
  int steps = 800, batch_size = 48;
  bool use_double = false;
  uint64_t seed = 1;
  std::string json;
};

constexpr int64_t kArms = 5;
constexpr double kTemperature = 2;

/// Points [n, 2] on the arms of a spiral; the target is the arm. With `fresh` they are drawn anew in each epoch.
lockstep::datasets::FromFunction spiral(int64_t size, bool fresh) {
  return {size, [fresh](at::ArrayRef<int64_t> indices, at::ArrayRef<uint64_t> seeds) {
            const torch::Tensor points = torch::empty({static_cast<int64_t>(indices.size()), 2}, torch::kDouble);
            for (size_t i = 0; i < indices.size(); ++i) {
              lockstep::transforms::Random random(fresh ? seeds[i] : static_cast<uint64_t>(indices[i]));
              const double out = 0.1 + 0.9 * random.uniform(), arm = static_cast<double>(indices[i] % kArms);
              const double angle = 2 * M_PI * arm / kArms + 5 * out + random.uniform();
              auto* point = points[static_cast<int64_t>(i)].data_ptr<double>();
              point[0] = out * std::cos(angle);
              point[1] = out * std::sin(angle);
            }
            return lockstep::Batch{points, torch::tensor(indices) % kArms};
          }};
}

/// Points become scores of the arms, [n, kArms].
nn::Sequential network(int64_t width, int layers) {
  nn::Sequential net(nn::Linear(2, width), nn::ReLU());
  for (int i = 1; i < layers; ++i) {
    net->push_back(nn::Linear(width, width));
    net->push_back(nn::ReLU());
  }
  net->push_back(nn::Linear(width, kArms));
  return net;
}

class School {
 public:
  School(const Options& options, lockstep::Context& context)
      : options_(options),
        context_(context),
        dtype_(options.use_double ? torch::kDouble : torch::kFloat),
        unseen_(spiral(1000, true), context, {.batch_size = 100, .exactly_once = true, .seed = options.seed + 1}) {}

  void run() {
    nn::Sequential teacher = network(128, 7), alone = network(16, 2), taught = network(16, 2);
    const auto by_label = [](const torch::Tensor&, const torch::Tensor& scores, const torch::Tensor& arms) {
      return nn::functional::cross_entropy(scores, arms);
    };
    learn("teacher", teacher, 2e-3, spiral(9600, true), by_label);
    learn("student alone", alone, 1e-2, spiral(options_.batch_size, false), by_label);  // there are few labels

    teacher->eval();
    learn("student, taught", taught, 1e-2, spiral(9600, true),
          [&teacher](const torch::Tensor& points, const torch::Tensor& scores, const torch::Tensor&) {
            return nn::functional::cross_entropy(scores / kTemperature, said_by(teacher, points)) *
                   (kTemperature * kTemperature);
          });
    if (context_.is_main()) report(*taught);
  }

 private:
  static torch::Tensor said_by(nn::Sequential& teacher, const torch::Tensor& points) {
    const torch::NoGradGuard no_grad;
    return (teacher->forward(points) / kTemperature).softmax(1);
  }

  template <typename Loss>
  void learn(const char* who, nn::Sequential& net, double rate, const lockstep::datasets::FromFunction& labelled,
             const Loss& loss_of) {
    net->to(dtype_);
    lockstep::DistributedDataParallel model(net, context_);
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(rate));
    lockstep::DataLoader train(
        labelled, context_,
        {.batch_size = options_.batch_size, .split_batches = true, .shuffle = true, .drop_last = true});
    lockstep::Metrics metrics;
    auto& mean = metrics.add("loss", lockstep::Mean());
    for (int step = 0; step < options_.steps;) {
      for (auto& [points, arms] : train) {
        const torch::Tensor there = points.to(dtype_);
        const torch::Tensor loss = loss_of(there, model(there), arms);
        loss.backward();
        mean.update(loss, points.size(0));
        if (!model.step_complete()) continue;  // with virtual ranks: others of this rank are still to come
        optimizer.step();
        optimizer.zero_grad();
        if (++step == options_.steps) break;
      }
    }
    metrics.reduce(context_.group());
    losses_.push_back(mean.value());
    told_.push_back(judge(*net));
    int64_t numbers = 0;
    for (const torch::Tensor& parameter : net->parameters()) numbers += parameter.numel();
    if (context_.is_main())
      std::printf("%-16s %ld numbers  loss %.4f  unseen points told %.2f\n", who, numbers, mean.value(), told_.back());
    std::fflush(stdout);
  }

  double judge(nn::SequentialImpl& net) {
    const torch::NoGradGuard no_grad;
    torch::Tensor right = torch::zeros({}, torch::kLong);
    for (auto& [points, arms] : unseen_) right += (net.forward(points.to(dtype_)).argmax(1) == arms).sum();
    context_.group().all_reduce(right);
    return right.item<double>() / static_cast<double>(unseen_.dataset_size());
  }

  void report(const nn::Module& net) const {
    if (options_.json.empty()) return;
    std::vector<double> norms;
    for (const torch::Tensor& parameter : net.parameters()) norms.push_back(parameter.norm().item<double>());
    const nlohmann::ordered_json figures{
        {"losses", losses_}, {"told", told_}, {"weights", norms}, {"hash", lockstep::hash(lockstep::state_dict(net))}};
    if (!(std::ofstream(options_.json) << figures.dump(2) << '\n'))
      throw lockstep::Error("the figures cannot be written to " + options_.json + "; choose another --json");
  }

  const Options& options_;
  lockstep::Context& context_;
  const torch::ScalarType dtype_;
  lockstep::DataLoader unseen_;
  std::vector<double> losses_, told_;  ///< of the teacher and both students
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"A small network learns from a large one, on all ranks of the launcher."};
  app.option_defaults()->always_capture_default();
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  app.add_option("--steps", options.steps, "Steps of each training")->check(at_least_one);
  app.add_option("--batch-size", options.batch_size, "Points of a step, on all ranks together")->check(at_least_one);
  app.add_flag("--double", options.use_double, "Compute in double, to compare numbers of ranks");
  app.add_option("--seed", options.seed, "Seed of weights, points and batches");
  app.add_option("--json", options.json, "File for the figures of the run");
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    lockstep::Context context({.seed = options.seed});
    School(options, context).run();
    return 0;
  });
}
