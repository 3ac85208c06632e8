#pragma once

#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/lockstep.h>
#include <nlohmann/json.hpp>

#include "training_options.h"

// The files that train_fashion_mnist leaves: a checkpoint of one epoch, and the figures of a run, which it prints as
// well.

namespace training_files {

/// The folder of the run: as RunLog chooses it.
inline std::string run_folder(const TrainingOptions& options) {
  const char* launchers = std::getenv("LOCKSTEP_RUN_DIR");
  if (!options.run_dir.empty()) return options.run_dir;
  return launchers != nullptr ? launchers : "runs/train_fashion_mnist";
}

/// For whoever wants to see it: the rank that is to die does, but not again after a restart.
inline void die_once(const TrainingOptions& options, const lockstep::Context& context) {
  const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  if (context.rank() == options.die_rank && (restarts == nullptr || std::atoi(restarts) == 0)) ::raise(SIGKILL);
}

/// Fails if the figures could not be written at the end. An old file stays until there are new ones.
inline void check_figures(const TrainingOptions& options) {
  if (!options.json.empty() && !std::ofstream(options.json, std::ios::app))
    throw lockstep::Error("the figures cannot be written to " + options.json + "; choose another --json");
}

/// Names optimizer and sharding if the command line did.
inline void write_figures(const TrainingOptions& options, nlohmann::ordered_json figures) {
  if (options.json.empty()) return;
  if (!options.optimizer.empty() || !options.sharded.empty()) {
    figures["optimizer"] = options.is_adamw() ? "adamw" : "sgd";
    figures["sharded"] = options.sharded.empty() ? "none" : options.sharded;
  }
  if (!(std::ofstream(options.json) << figures.dump(2) << '\n'))
    throw lockstep::Error("the figures cannot be written to " + options.json + "; choose another --json");
}

/// The result of a run.
struct Outcome {
  int world_size, epochs;
  double seconds;  ///< of training
  double samples_per_second, communication_share, test_accuracy;
  int64_t test_samples;
  std::vector<double> train_loss;
  std::string parameters_hash, folder;
  int64_t steps;           ///< of the optimizer, all epochs
  double validation_loss;  ///< on the test images
  std::optional<int64_t> bytes_between_machines{};
};

/// Prints it, and writes --json.
inline void report(const TrainingOptions& options, const Outcome& run) {
  std::printf(
      "%d %s, %d epochs in %.1f s: %.0f samples/s, %.0f %% of the time in communication\n"
      "test accuracy %.4f, parameters %s, checkpoint in %s/checkpoint.safetensors\n",
      run.world_size, run.world_size == 1 ? "rank" : "ranks", run.epochs, run.seconds, run.samples_per_second,
      100 * run.communication_share, run.test_accuracy, run.parameters_hash.c_str(), run.folder.c_str());
  nlohmann::ordered_json figures{{"world_size", run.world_size},
                                 {"test_accuracy", run.test_accuracy},
                                 {"test_samples", run.test_samples},
                                 {"train_loss", run.train_loss},
                                 {"seconds", run.seconds},
                                 {"samples_per_second", run.samples_per_second},
                                 {"communication_share", run.communication_share},
                                 {"parameters_hash", run.parameters_hash},
                                 {"steps", run.steps},
                                 {"validation_loss", run.validation_loss}};
  if (run.bytes_between_machines) figures["bytes_between_machines"] = *run.bytes_between_machines;
  write_figures(options, std::move(figures));
}

/// All ranks call it; rank 0 writes. `losses`: the mean of each epoch that is done.
inline void save_epoch(const torch::nn::Module& net, const torch::optim::Optimizer& optimizer,
                       const std::vector<double>& losses, const lockstep::Context& context, const std::string& path) {
  lockstep::Checkpoint checkpoint;
  checkpoint.tensors.update(lockstep::with_prefix("model.", lockstep::state_dict(net)));
  checkpoint.tensors.update(lockstep::with_prefix("optimizer.", lockstep::state_dict(optimizer)));
  checkpoint.metadata["epochs_done"] = std::to_string(losses.size());
  checkpoint.metadata["train_loss"] = nlohmann::json(losses).dump();
  if (context.is_main()) lockstep::save(checkpoint, path);
}

/// The reverse, from the file or from the run folder that holds it: returns the losses. All ranks call it.
inline std::vector<double> load_epoch(torch::nn::Module& net, torch::optim::Optimizer& optimizer,
                                      const std::string& file_or_folder) {
  const bool is_folder = std::filesystem::is_directory(file_or_folder);
  const std::string path = file_or_folder + (is_folder ? "/checkpoint.safetensors" : "");
  lockstep::Checkpoint checkpoint = lockstep::load(path);
  try {
    lockstep::load_state_dict(net, lockstep::without_prefix("model.", checkpoint.tensors));
    lockstep::load_state_dict(optimizer, lockstep::without_prefix("optimizer.", checkpoint.tensors));
    const auto losses = nlohmann::json::parse(checkpoint.metadata["train_loss"], nullptr, /*allow_exceptions=*/false);
    if (!losses.is_array() || checkpoint.metadata["epochs_done"] != std::to_string(losses.size()))
      throw lockstep::Error("it is not a checkpoint of this program: its metadata lacks epochs_done or train_loss");
    return losses.get<std::vector<double>>();
  } catch (const std::exception& error) {
    throw lockstep::Error("cannot resume from " + path + ": " + error.what());
  }
}

}  // namespace training_files
