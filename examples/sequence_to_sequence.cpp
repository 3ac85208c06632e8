// Learns to sort: sequences of digits, from 3 to 12 long, become the same digits in order. A transformer with padding
// masks, and batches whose parts on the ranks have uneven numbers of tokens.
//
//     lockstep run -n 2 -- build/bin/sequence_to_sequence
//
// Every hundred steps print a line such as
//
//     step 400/400  loss 0.0306  unseen sequences sorted 0.95
//
// Points to copy:
//
// - A rank's loss is the mean over its own tokens. set_weight() with their number makes the gradients of all ranks the
//   mean over all tokens. Ranks' tokens count alike then, and the result does not depend on how they are dealt out.
// - A batch is padded to its own longest sequence, by the loader's function that makes batches. Padding is masked in
//   attention and left out of the loss, so it changes nothing whatever its length.
// - Each unseen sequence is judged on one rank, and the counts are summed.

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

namespace nn = torch::nn;

struct Options {
  int steps = 400, batch_size = 48;
  bool use_double = false;
  uint64_t seed = 1;
  std::string json;
};

constexpr int64_t kPad = 10, kStart = 11, kEnd = 12, kTokens = 13;

/// Sequences of digits that a seed and an index determine.
struct Sequences {
  uint64_t seed;
  int64_t count;

  int64_t size() const { return count; }
  std::vector<int64_t> get(int64_t index) const {
    lockstep::transforms::Random random(seed * 1000003 + static_cast<uint64_t>(index));
    std::vector<int64_t> digits(static_cast<size_t>(3 + random.below(10)));
    for (int64_t& digit : digits) digit = random.below(10);
    return digits;
  }
};

/// Tokens, int64 [n, longest sequence], padded at the end.
struct Sentences {
  torch::Tensor source, target;  ///< target: kStart, the tokens, kEnd
};

torch::Tensor padded(const std::vector<std::vector<int64_t>>& sequences) {
  std::vector<torch::Tensor> rows;
  for (const auto& sequence : sequences) rows.push_back(torch::tensor(sequence));
  return nn::utils::rnn::pad_sequence(rows, /*batch_first=*/true, kPad);
}

Sentences collate(std::vector<std::vector<int64_t>> digits) {
  const torch::Tensor source = padded(digits);
  for (auto& sequence : digits) {
    std::sort(sequence.begin(), sequence.end());
    sequence.insert(sequence.begin(), kStart);
    sequence.push_back(kEnd);
  }
  return {source, padded(digits)};
}

struct TranslatorImpl : nn::Module {
  static constexpr int64_t kWidth = 64;
  /// source [n, s], target [n, t]; returns scores of the tokens that follow each of target's, [n, t, kTokens].
  torch::Tensor forward(const torch::Tensor& source, const torch::Tensor& target) {
    const torch::Tensor unseen = source == kPad;
    const auto later = nn::TransformerImpl::generate_square_subsequent_mask(target.size(1)).to(words->weight.dtype());
    return last(transformer->forward(placed(source), placed(target), {}, later, {}, unseen, target == kPad, unseen)
                    .transpose(0, 1));
  }
  /// [length, n, width]
  torch::Tensor placed(const torch::Tensor& tokens) {
    return (words(tokens) + places(torch::arange(tokens.size(1)))).transpose(0, 1);
  }
  nn::Embedding words{register_module("words", nn::Embedding(kTokens, kWidth))};
  nn::Embedding places{register_module("places", nn::Embedding(32, kWidth))};
  nn::Transformer transformer{register_module(
      "transformer", nn::Transformer(nn::TransformerOptions(kWidth, 4, 2, 2).dim_feedforward(128).dropout(0)))};
  nn::Linear last{register_module("last", nn::Linear(kWidth, kTokens))};
};
TORCH_MODULE(Translator);

class Training {
 public:
  Training(const Options& options, lockstep::Context& context)
      : options_(options),
        context_(context),
        train_(Sequences{options.seed, 9600}, context,
               {.batch_size = options.batch_size, .split_batches = true, .shuffle = true, .drop_last = true}, collate),
        unseen_(Sequences{options.seed + 1, 200}, context, {.batch_size = 50, .exactly_once = true}, collate) {
    net_->to(options.use_double ? torch::kDouble : torch::kFloat);
    model_.emplace(net_, context,
                   lockstep::DistributedDataParallelOptions{.reduction = lockstep::GradientReduction::kWeightedMean});
    optimizer_.emplace(net_->parameters(), torch::optim::AdamOptions(1e-3));
  }

  void run() {
    lockstep::Metrics metrics;
    auto& loss = metrics.add("loss", lockstep::Mean());
    for (int step = 0; step < options_.steps;) {
      for (auto& [source, target] : train_) {
        const int64_t tokens = (target != kPad).sum().item<int64_t>() - target.size(0);
        loss.update(learn(source, target, tokens), tokens);
        if (!model_->step_complete()) continue;  // with virtual ranks: others of this rank are still to come
        model_->clip_grad_norm(1);
        optimizer_->step();
        optimizer_->zero_grad();
        if (++step % 100 == 0 || step == options_.steps) {
          metrics.reduce(context_.group());
          losses_.push_back(loss.value());
          sorted_.push_back(judge());
          if (context_.is_main())
            std::printf("step %d/%d  loss %.4f  unseen sequences sorted %.2f\n", step, options_.steps, loss.value(),
                        sorted_.back());
          std::fflush(stdout);
        }
        if (step == options_.steps) break;
      }
    }
    report();
  }

 private:
  torch::Tensor learn(const torch::Tensor& source, const torch::Tensor& target, int64_t tokens) {
    const int64_t length = target.size(1) - 1;
    const torch::Tensor scores = (*model_)(source, target.narrow(1, 0, length));
    const torch::Tensor loss = nn::functional::cross_entropy(
        scores.flatten(0, 1), target.narrow(1, 1, length).flatten(),
        nn::functional::CrossEntropyFuncOptions().ignore_index(kPad));  // the mean over this rank's tokens
    model_->set_weight(static_cast<double>(tokens));
    loss.backward();
    return loss.detach();
  }

  /// The part of the unseen sequences whose every token comes out right, one after another.
  double judge() {
    const torch::NoGradGuard no_grad;
    net_->eval();
    torch::Tensor right_and_all = torch::zeros({2}, torch::kLong);
    for (auto& [source, target] : unseen_) {
      torch::Tensor said = torch::full({source.size(0), 1}, kStart);
      while (said.size(1) < target.size(1))
        said = torch::cat({said, net_(source, said).select(1, -1).argmax(1, true)}, 1);
      const torch::Tensor right = ((said == target) | (target == kPad)).all(1);
      right_and_all += torch::stack({right.sum(), torch::tensor(right.size(0))});
    }
    context_.group().all_reduce(right_and_all);
    net_->train();
    return right_and_all[0].item<double>() / right_and_all[1].item<double>();
  }

  void report() {
    if (!context_.is_main() || options_.json.empty()) return;
    std::vector<double> norms;
    for (const torch::Tensor& parameter : net_->parameters()) norms.push_back(parameter.norm().item<double>());
    const nlohmann::ordered_json figures{{"losses", losses_},
                                         {"sorted", sorted_},
                                         {"weights", norms},
                                         {"hash", lockstep::hash(lockstep::state_dict(*net_))}};
    if (!(std::ofstream(options_.json) << figures.dump(2) << '\n'))
      throw lockstep::Error("the figures cannot be written to " + options_.json + "; choose another --json");
  }

  const Options& options_;
  lockstep::Context& context_;
  lockstep::ExampleLoader<Sentences> train_, unseen_;
  Translator net_;
  std::optional<lockstep::DistributedDataParallel<Translator>> model_;
  std::optional<torch::optim::Adam> optimizer_;
  std::vector<double> losses_, sorted_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"Learns to sort sequences of uneven length, on all ranks of the launcher."};
  app.option_defaults()->always_capture_default();
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  app.add_option("--steps", options.steps, "Steps of training")->check(at_least_one);
  app.add_option("--batch-size", options.batch_size, "Sequences of a step, on all ranks together")->check(at_least_one);
  app.add_flag("--double", options.use_double, "Compute in double, to compare numbers of ranks");
  app.add_option("--seed", options.seed, "Seed of weights, sequences and batches");
  app.add_option("--json", options.json, "File for the figures of the run");
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    lockstep::Context context({.seed = options.seed});
    Training(options, context).run();
    return 0;
  });
}
