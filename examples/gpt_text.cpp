// Trains a small transformer to continue a text byte by byte. It learns from any text file; by default from the GNU
// General Public License, which every Debian machine has.
//
//     lockstep run -n 2 -- build/bin/gpt_text --epochs 8
//
// Each epoch ends with a line such as
//
//     epoch 8/8  loss 2.0681  perplexity of unseen text 11.9
//
// where 256 bytes could come next. The training ends with a generated text that begins with --prompt. --text FILE
// trains on another file. --folder FOLDER saves checkpoints there, and continues from the newest, on any number of
// ranks. --memory-every 1 also saves each step to the launcher's memory, from which a run goes on under
// --max-restarts.
//
// The ranks of a machine share one copy of the parameters and of AdamW's state, and each steps its part of them
// (docs/optimizers.md). With --fully-sharded that copy is there once over all machines, and a layer is gathered while
// it is used (docs/large_models.md); with --parts bf16 it has 16 bits, which halves what is gathered, and AdamW
// steps copies in float. With --sync-every 100 each machine trains by itself, and machines synchronise
// every 100 steps (docs/slow_networks.md). --json FILE writes the figures of the run. --estimate 2x4 prints, instead of
// training, how much memory each way takes on 2 machines with 4 ranks each.

#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "support/machine_options.h"
#include "support/peak_memory.h"

namespace {

struct Options {
  std::string text = "/usr/share/common-licenses/GPL-3";
  int epochs = 8;
  int batch_size = 16;
  int block_length = 64;
  int layers = 2;
  int heads = 4;
  int width = 64;
  double lr = 3e-3;
  std::string folder;
  int stop_after = 0;
  std::optional<int64_t> memory_every;
  std::string prompt = "The ";
  int generate = 200;
  uint64_t seed = 1;
  bool fully_sharded = false, keep_gathered = false, checkpoint_activations = false;
  torch::Dtype parts = torch::kFloat;
  MachineOptions machines;
  std::string json;
  std::string estimate;
};

constexpr int64_t kVocabulary = 256;

/// Causal self-attention, then an MLP.
struct LayerImpl : torch::nn::Module {
  LayerImpl(int64_t width, int64_t heads_, torch::Dtype dtype) : heads(heads_) {
    register_module("norm_1", norm_1 = torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    register_module("attention", attention = torch::nn::Linear(width, 3 * width));
    register_module("projection", projection = torch::nn::Linear(width, width));
    register_module("norm_2", norm_2 = torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    register_module("mlp", mlp = torch::nn::Sequential(torch::nn::Linear(width, 4 * width), torch::nn::GELU(),
                                                       torch::nn::Linear(4 * width, width)));
    to(dtype);  // here, because a ShardedInitialization keeps only a part once the layer is made
  }
  /// x [n, length, width]; returns the same.
  torch::Tensor forward(torch::Tensor x) {
    const int64_t n = x.size(0), length = x.size(1), width = x.size(2);
    // [3, n, heads, length, width of a head]
    const torch::Tensor qkv = attention(norm_1(x)).view({n, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const torch::Tensor seen =
        at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, /*dropout_p=*/0, /*is_causal=*/true);
    x = x + projection(seen.transpose(1, 2).reshape({n, length, width}));
    return x + mlp->forward(norm_2(x));
  }
  const int64_t heads;
  torch::nn::LayerNorm norm_1{nullptr}, norm_2{nullptr};
  torch::nn::Linear attention{nullptr}, projection{nullptr};
  torch::nn::Sequential mlp{nullptr};
};
TORCH_MODULE(Layer);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const Options& options) : segments(options.checkpoint_activations ? options.layers : 1) {
    const int64_t width = options.width;
    register_module("tokens", tokens = torch::nn::Embedding(kVocabulary, width));
    register_module("places", places = torch::nn::Embedding(options.block_length, width));
    for (int i = 0; i < options.layers; ++i)
      layers->push_back(lockstep::ShardedUnit<Layer>(width, options.heads, options.parts));
    register_module("layers", layers);
    register_module("norm", norm = torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    register_module("head", head = torch::nn::Linear(width, kVocabulary));
    for (torch::nn::Module* outside : std::initializer_list<torch::nn::Module*>{&*tokens, &*places, &*norm, &*head})
      outside->to(options.parts);
  }
  /// text int64 [n, length]; returns scores of the next byte [n, length, 256].
  torch::Tensor forward(const torch::Tensor& text) {
    const torch::Tensor place = torch::arange(text.size(1), text.options());
    const torch::Tensor x = tokens(text) + places(place);
    return head(norm(lockstep::checkpoint_sequential(layers, segments, x))).to(torch::kFloat);
  }
  torch::nn::Embedding tokens{nullptr}, places{nullptr};
  torch::nn::Sequential layers;
  const int segments;  ///< of the layers; backward computes the activations of all but the last again
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);

torch::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& target) {
  return torch::nn::functional::cross_entropy(scores.view({-1, kVocabulary}), target.view(-1));
}

/// The prompt and its continuation. Bytes that are not printable ASCII become dots.
std::string written_by(Gpt& net, const Options& options) {
  const lockstep::EvaluationMode mode(*net);
  torch::NoGradGuard no_grad;
  torch::manual_seed(options.seed);
  std::vector<int64_t> bytes;
  for (const char byte : options.prompt) bytes.push_back(static_cast<unsigned char>(byte));
  while (static_cast<int>(bytes.size()) < static_cast<int>(options.prompt.size()) + options.generate) {
    const size_t seen = std::min(bytes.size(), static_cast<size_t>(options.block_length));
    const torch::Tensor text =
        torch::tensor(std::vector<int64_t>(bytes.end() - static_cast<int64_t>(seen), bytes.end()));
    const torch::Tensor scores = net(text.unsqueeze(0))[0][-1];
    bytes.push_back(torch::multinomial((scores / 0.7).softmax(0), 1).item<int64_t>());
  }
  std::string text;
  for (const int64_t byte : bytes)
    text += byte == '\n' || byte == ' ' ? ' ' : byte > ' ' && byte < 127 ? static_cast<char>(byte) : '.';
  return text;
}

/// On all ranks alike, if they gather layers together; then the samples that make up for missing ones count twice.
template <typename Loader, typename LookAt>
void evaluate(const Options& options, const lockstep::Context& context, Gpt& net, Loader& loader,
              lockstep::Metrics& metrics, const LookAt& look_at) {
  if (!options.fully_sharded) return lockstep::evaluate(*net, loader, context.group(), metrics, look_at);
  const lockstep::EvaluationMode mode(*net);
  const torch::NoGradGuard no_grad;
  metrics.reset();
  for (auto& batch : loader) look_at(batch);
  metrics.reduce(context.group());
}

lockstep::datasets::TokenFile part_of(const Options& options, double from, double to, int64_t stride) {
  return lockstep::datasets::TokenFile(options.text, {.block_length = options.block_length,
                                                      .type = lockstep::datasets::TokenType::kByte,
                                                      .stride = stride,
                                                      .from = from,
                                                      .to = to});
}

/// What --json asks for. `diloco`: null without --sync-every.
template <typename Model>
void write_figures(const Options& options, const lockstep::Context& context, Gpt& net, Model& model,
                   const lockstep::DiLoCo* diloco, nlohmann::json figures, const PeakMemory& memory) {
  const torch::Tensor all = context.group().all_gather(torch::tensor({memory.mib()}, torch::kDouble)).flatten();
  figures["ranks"] = context.world_size();
  figures["peak_mib"] = std::vector<double>(all.data_ptr<double>(), all.data_ptr<double>() + all.numel());
  const auto total = [&](int64_t bytes) { return machine_options::bytes_between_machines(context, bytes); };
  if constexpr (std::derived_from<Model, lockstep::FullySharded>) {
    figures["parameters_hash"] = model.hash();
    figures["bytes_between_machines"] = total(model.stats().sent_bytes);
  } else {
    figures["parameters_hash"] = lockstep::hash(lockstep::state_dict(*net));
    if (diloco) figures["bytes_between_machines"] = total(diloco->stats().bytes_sent);
  }
  if (context.is_main()) std::ofstream(options.json) << figures.dump(2) << '\n';
}

/// Adds what a checkpoint holds.
template <typename Model, typename Optimizer>
void add_parts(lockstep::Checkpointer& checkpointer, Gpt& net, Model& model, Optimizer& optimizer,
               lockstep::DiLoCo* diloco) {
  if constexpr (std::derived_from<Model, lockstep::FullySharded>)
    checkpointer.add("model", model).add("optimizer", optimizer);
  else
    machine_options::add_parts(checkpointer, *net, model, optimizer, diloco);
}

/// `model`: a DistributedDataParallel or a FullyShardedDataParallel of `net`, over the ranks of `replicas`.
template <typename Model>
void train(const Options& options, const lockstep::Context& context, Gpt& net, Model& model,
           const lockstep::Group& replicas, lockstep::DiLoCo* diloco = nullptr) {
  lockstep::DataLoader train(part_of(options, 0, 0.9, std::max(1, options.block_length / 4)),
                             lockstep::island_shard(context),
                             {.batch_size = options.batch_size, .shuffle = true, .drop_last = true});
  // All ranks gather a layer, so all run as many batches.
  lockstep::DataLoader valid(part_of(options, 0.9, 1, 0), context,
                             {.batch_size = options.batch_size, .exactly_once = !options.fully_sharded});

  const auto adamw = torch::optim::AdamWOptions(options.lr).betas({0.9, 0.95}).weight_decay(0.1);
  lockstep::ZeroRedundancyOptimizer optimizer(
      model, lockstep::decay_groups(*net, adamw), adamw,
      {.shared_parameters = replicas.backend() == "shm", .master_weights = options.parts != torch::kFloat});
  const int64_t steps = options.epochs * train.size(), rising = std::max<int64_t>(1, steps / 20);
  lockstep::LRScheduler scheduler(
      optimizer, lockstep::warm_up(rising, lockstep::cosine_annealing_lr(std::max<int64_t>(1, steps - rising))));
  std::optional<lockstep::Checkpointer> checkpointer;
  if (!options.folder.empty()) {
    // Machines of `lockstep run --islands` have a folder each.
    const std::string own = "/machine_" + std::to_string(lockstep::island().number);
    checkpointer.emplace(
        lockstep::island().count > 1 ? options.folder + own : options.folder, context.group(),
        lockstep::CheckpointerOptions{
            .every_minutes = 10, .higher_is_better = false, .memory_every_n_steps = options.memory_every});
    add_parts(*checkpointer, net, model, optimizer, diloco);
    checkpointer->add("schedule", scheduler).add("loader", train);
    checkpointer->resume();
  }
  lockstep::Metrics metrics;
  auto& perplexity = metrics.add("perplexity", lockstep::Perplexity());
  lockstep::Metrics training;
  auto& mean = training.add("loss", lockstep::Mean());
  PeakMemory memory;
  double seconds = 0;

  for (const int epoch : train.epochs(options.epochs)) {
    const auto start = std::chrono::steady_clock::now();
    int64_t left = train.steps_left();
    auto bar = lockstep::progress(train);
    for (auto& [data, target] : bar) {
      optimizer.zero_grad();
      const torch::Tensor loss = loss_of(model(data), target);
      loss.backward();
      model.clip_grad_norm(1);
      optimizer.step();
      if (diloco) diloco->step();
      if (!options.json.empty()) memory.look();
      scheduler.step();
      // The last step of an epoch is saved when the epoch has been evaluated.
      if (checkpointer && --left > 0) checkpointer->step(scheduler.steps());
      mean.update(loss, target.numel());
      bar.loss(loss.item<double>());
    }
    if (diloco && epoch + 1 == options.epochs) diloco->finish();
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    training.reduce(context.group());
    evaluate(options, context, net, valid, metrics,
             [&](auto& batch) { perplexity.update(loss_of(net(batch.data), batch.target), batch.target.numel()); });
    if (checkpointer) checkpointer->save(scheduler.steps(), perplexity.value());
    if (context.is_main())
      std::printf("epoch %d/%d  loss %.4f  perplexity of unseen text %.1f\n", epoch + 1, options.epochs, mean.value(),
                  perplexity.value());
    std::fflush(stdout);
    if (epoch + 1 == options.stop_after) break;
  }
  if (checkpointer) checkpointer->finish();
  if (!options.json.empty())
    write_figures(
        options, context, net, model, diloco,
        {{"steps", scheduler.steps()}, {"seconds", seconds}, {"validation_loss", std::log(perplexity.value())}},
        memory);
  const std::string text = written_by(net, options);  // by all ranks, which gather the layers
  if (context.is_main()) std::printf("%s\n", text.c_str());
}

/// For `options.estimate`, such as "2x4".
void print_estimate(const Options& options) {
  lockstep::MemoryEstimateOptions on;
  char rest = 0;
  if (std::sscanf(options.estimate.c_str(), "%dx%d%c", &on.machines, &on.ranks_per_machine, &rest) != 2 ||
      on.machines < 1 || on.ranks_per_machine < 1)
    throw lockstep::Error("--estimate needs numbers of machines and of ranks on each, such as 2x4");
  if (options.parts != torch::kFloat) on.state_per_parameter = 6;  // three floats for each of 16 bits
  const Gpt net(options);
  std::printf("%s", lockstep::memory_table(lockstep::estimate_memory(*net, on)).c_str());
}

void run(const Options& options, const lockstep::Context& context) {
  std::optional<lockstep::ShardedInitialization> part_by_part;
  if (options.fully_sharded) part_by_part.emplace(context);
  Gpt net(options);
  part_by_part.reset();
  if (options.fully_sharded) {
    lockstep::FullyShardedDataParallel model(net, context, {.keep_gathered = options.keep_gathered});
    train(options, context, net, model, context.group());
  } else {
    const lockstep::Group replicas = machine_options::replicas(options.machines, context);
    lockstep::DistributedDataParallel model(net, replicas);
    std::optional<lockstep::DiLoCo> diloco;
    if (options.machines.train_separately()) diloco.emplace(model, context, options.machines.diloco());
    train(options, context, net, model, replicas, diloco ? &*diloco : nullptr);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  CLI::App app{"Trains a small transformer on the bytes of a text, on all ranks of the launcher."};
  const auto number = [&](const char* name, int& value, const char* what) {
    app.add_option(name, value, what)->capture_default_str()->check(at_least_one);
  };
  app.add_option("--text", options.text, "The file to learn from")->capture_default_str();
  number("--epochs", options.epochs, "Passes over the text");
  number("--batch-size", options.batch_size, "Pieces of text per batch on each rank");
  number("--block-length", options.block_length, "Bytes per piece");
  number("--layers", options.layers, "Layers of the transformer");
  number("--heads", options.heads, "Heads of the attention; must divide the width");
  number("--width", options.width, "Width of the transformer");
  app.add_option("--lr", options.lr, "Peak learning rate")->capture_default_str()->check(CLI::PositiveNumber);
  auto* const folder =
      app.add_option("--folder", options.folder, "Folder of checkpoints, from which it resumes (else there are none)");
  app.add_option("--stop-after", options.stop_after, "Epoch after which to stop (else when all are done)")
      ->check(at_least_one);
  app.add_option("--memory-every", options.memory_every,
                 "Steps between checkpoints in the launcher's memory, for ranks that it restarts")
      ->check(at_least_one)
      ->needs(folder);
  app.add_option("--prompt", options.prompt, "How the text to write begins")->capture_default_str();
  number("--generate", options.generate, "Bytes to write");
  app.add_option("--seed", options.seed, "Seed of weights, order and the text to write")->capture_default_str();
  auto* const sharded =
      app.add_flag("--fully-sharded", options.fully_sharded, "Hold parameters and state once over all machines");
  app.add_flag("--keep-gathered", options.keep_gathered, "Layers that were gathered stay so until the step")
      ->needs(sharded);
  app.add_option("--parts", options.parts, "Type of the parameters: float, or bf16 with copies in float")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, torch::Dtype>{{"float", torch::kFloat}, {"bf16", torch::kBFloat16}}))
      ->needs(sharded);
  app.add_flag("--checkpoint-activations", options.checkpoint_activations, "Compute activations again in backward")
      ->excludes(sharded);
  options.machines.add_to(app)->excludes(sharded);
  app.add_option("--json", options.json, "File for the figures of the run");
  app.add_option("--estimate", options.estimate, "Print what memory training takes on MACHINESxRANKS, and end");
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    if (options.width % options.heads != 0) throw lockstep::Error("--heads must divide --width");
    if (options.prompt.empty()) throw lockstep::Error("--prompt must not be empty");
    if (!options.estimate.empty()) {
      print_estimate(options);
      return 0;
    }
    const lockstep::Context context({.seed = options.seed});
    run(options, context);
    return 0;
  });
}
