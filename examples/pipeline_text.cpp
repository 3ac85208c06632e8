// gpt_text.cpp with the layers on different ranks: each rank has a stage of them, and batches go through the stages in
// micro-batches.
//
//     lockstep run -n 2 -- build/bin/pipeline_text --epochs 2
//
// With --stages 2 on 4 ranks there are two pipelines, each with its part of the data. An epoch ends with a line such as
//
//     epoch 2/2  loss 2.4907  perplexity of unseen text 11.2

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
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
  std::string text = "/usr/share/common-licenses/GPL-3";
  int epochs = 2;
  int batch_size = 32;
  int block_length = 64;
  int layers = 4;
  int heads = 4;
  int width = 64;
  int stages = 0;
  int micro_batches = 0;
  double lr = 3e-3;
  std::string folder;
  std::optional<int64_t> memory_every;
  std::string json;
};

constexpr int64_t kVocabulary = 256;

/// text int64 [n, length]; returns [n, length, width].
struct EmbeddingsImpl : nn::Module {
  EmbeddingsImpl(int64_t length, int64_t width) {
    register_module("tokens", tokens = nn::Embedding(kVocabulary, width));
    register_module("places", places = nn::Embedding(length, width));
  }
  torch::Tensor forward(const torch::Tensor& text) {
    return tokens(text) + places(torch::arange(text.size(1), text.options()));
  }
  nn::Embedding tokens{nullptr}, places{nullptr};
};
TORCH_MODULE(Embeddings);

/// Causal self-attention, then an MLP. x [n, length, width]; returns the same.
struct LayerImpl : nn::Module {
  LayerImpl(int64_t width, int64_t heads_) : heads(heads_) {
    register_module("norm_1", norm_1 = nn::LayerNorm(nn::LayerNormOptions({width})));
    register_module("attention", attention = nn::Linear(width, 3 * width));
    register_module("projection", projection = nn::Linear(width, width));
    register_module("norm_2", norm_2 = nn::LayerNorm(nn::LayerNormOptions({width})));
    register_module("mlp",
                    mlp = nn::Sequential(nn::Linear(width, 4 * width), nn::GELU(), nn::Linear(4 * width, width)));
  }
  torch::Tensor forward(torch::Tensor x) {
    const int64_t n = x.size(0), length = x.size(1), width = x.size(2);
    const torch::Tensor qkv = attention(norm_1(x)).view({n, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const torch::Tensor seen = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0, /*is_causal=*/true);
    x = x + projection(seen.transpose(1, 2).reshape({n, length, width}));
    return x + mlp->forward(norm_2(x));
  }
  const int64_t heads;
  nn::LayerNorm norm_1{nullptr}, norm_2{nullptr};
  nn::Linear attention{nullptr}, projection{nullptr};
  nn::Sequential mlp{nullptr};
};
TORCH_MODULE(Layer);

torch::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& target) {
  return nn::functional::cross_entropy(scores.reshape({-1, kVocabulary}), target.reshape(-1));
}

lockstep::datasets::TokenFile part_of(const Options& options, double from, double to) {
  return lockstep::datasets::TokenFile(options.text, {.block_length = options.block_length,
                                                      .type = lockstep::datasets::TokenType::kByte,
                                                      .stride = options.block_length / 4,
                                                      .from = from,
                                                      .to = to});
}

void run(const Options& options, const lockstep::Context& context) {
  // A rank makes one layer after the other, and keeps those of its stage.
  std::vector<lockstep::Pipeline::MakeLayer> layers;
  layers.push_back([&] { return nn::AnyModule(Embeddings(options.block_length, options.width)); });
  for (int i = 0; i < options.layers; ++i)
    layers.push_back([&] { return nn::AnyModule(Layer(options.width, options.heads)); });
  layers.push_back([&] { return nn::AnyModule(nn::LayerNorm(nn::LayerNormOptions({options.width}))); });
  layers.push_back([&] { return nn::AnyModule(nn::Linear(options.width, kVocabulary)); });
  lockstep::Pipeline pipeline(layers, context, {.stages = options.stages, .micro_batches = options.micro_batches});
  lockstep::ZeroRedundancyOptimizer optimizer(pipeline.replica(), torch::optim::AdamWOptions(options.lr));

  // The ranks of a pipeline read the same batches.
  lockstep::DataLoader train(part_of(options, 0, 0.9), pipeline.shard(),
                             {.batch_size = options.batch_size, .shuffle = true, .drop_last = true});
  lockstep::DataLoader valid(part_of(options, 0.9, 1), pipeline.shard(), {.batch_size = options.batch_size});
  std::optional<lockstep::Checkpointer> checkpointer;
  if (!options.folder.empty()) {
    checkpointer.emplace(options.folder, context.group(),
                         lockstep::CheckpointerOptions{.memory_every_n_steps = options.memory_every});
    using Scope = lockstep::Checkpointer::Scope;
    checkpointer->add("model", pipeline).add("optimizer", optimizer, Scope::kEachRank);
    checkpointer->add("loader", train, Scope::kEachRank);
    checkpointer->resume();
  }
  int64_t step = checkpointer ? checkpointer->resumed_step() : 0;
  for (const int epoch : train.epochs(options.epochs)) {
    double sum = 0;
    int64_t batches = 0;
    for (auto& [data, target] : train) {
      optimizer.zero_grad();
      sum += pipeline.forward_backward(data, target, loss_of);
      ++batches;
      pipeline.clip_grad_norm(1);
      optimizer.step();
      ++step;
      if (checkpointer) checkpointer->step(step);
    }
    double unseen = 0;
    int64_t looked = 0;
    for (auto& [data, target] : valid) {
      unseen += loss_of(pipeline.forward(data), target).item<double>();
      ++looked;
    }
    if (checkpointer) checkpointer->save(step);
    if (context.is_main())
      std::printf("epoch %d/%d  loss %.4f  perplexity of unseen text %.1f\n", epoch + 1, options.epochs,
                  sum / static_cast<double>(batches), std::exp(unseen / static_cast<double>(looked)));
    std::fflush(stdout);
  }
  if (checkpointer) checkpointer->finish();
  const lockstep::StateDict state = pipeline.state_dict();  // on rank 0
  if (context.is_main() && !options.json.empty())
    std::ofstream(options.json) << nlohmann::json{{"steps", step}, {"parameters_hash", lockstep::hash(state)}} << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  CLI::App app{"Trains a small transformer on the bytes of a text, with its layers on different ranks."};
  const auto number = [&](const char* name, int& value, const char* what) {
    app.add_option(name, value, what)->capture_default_str()->check(at_least_one);
  };
  app.add_option("--text", options.text, "The file to learn from")->capture_default_str();
  number("--epochs", options.epochs, "Passes over the text");
  number("--batch-size", options.batch_size, "Pieces of text per batch of each pipeline");
  number("--block-length", options.block_length, "Bytes per piece");
  number("--layers", options.layers, "Layers of the transformer");
  number("--heads", options.heads, "Heads of the attention; must divide the width");
  number("--width", options.width, "Width of the transformer");
  app.add_option("--stages", options.stages, "Ranks that share the layers of one pipeline (else all)");
  app.add_option("--micro-batches", options.micro_batches, "Parts of a batch (else two for each stage)");
  app.add_option("--lr", options.lr, "Learning rate")->capture_default_str()->check(CLI::PositiveNumber);
  auto* const folder =
      app.add_option("--folder", options.folder, "Folder of checkpoints, from which it resumes (else there are none)");
  app.add_option("--memory-every", options.memory_every,
                 "Steps between checkpoints in the launcher's memory, for ranks that it restarts")
      ->check(at_least_one)
      ->needs(folder);
  app.add_option("--json", options.json, "File for the number of steps and a hash of the parameters");
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    if (options.width % options.heads != 0) throw lockstep::Error("--heads must divide --width");
    if (options.block_length < 4) throw lockstep::Error("--block-length must be at least 4");
    const lockstep::Context context({.seed = 1});
    run(options, context);
    return 0;
  });
}
