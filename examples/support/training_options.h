#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include <lockstep/lockstep.h>
#include <CLI/CLI.hpp>

#include "machine_options.h"

/// The command-line options of train_fashion_mnist.
struct TrainingOptions {
  int epochs = 4, batch_size = 64, virtual_ranks = 0;
  std::optional<double> lr;
  std::string optimizer, sharded;  ///< empty: not given, which means sgd and none
  uint64_t seed = 42;
  int64_t memory_every = 0, die_at = 0;  ///< 0: not
  int die_rank = 0;
  MachineOptions machines;
  std::string data = "/usr/share/datasets/fashion-mnist", run_dir, resume, json, backend;

  bool is_adamw() const { return optimizer == "adamw"; }
  bool is_sharded() const { return sharded == "replicated" || sharded == "shared"; }
  double peak_lr() const { return lr.value_or(is_adamw() ? 1e-3 : 0.1); }

  void add_to(CLI::App& app) {
    app.option_defaults()->always_capture_default();
    const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
    app.add_option("--epochs", epochs, "Passes over the training images")->check(at_least_one);
    app.add_option("--batch-size", batch_size, "Images per batch on each rank")->check(at_least_one);
    app.add_option("--lr", lr, "Peak learning rate (else 0.1, or 0.001 of adamw)");
    app.add_option("--optimizer", optimizer, "sgd (if not given) or adamw")->check(CLI::IsMember({"sgd", "adamw"}));
    app.add_option("--sharded", sharded,
                   "none (if not given): each rank steps its copy by LibTorch's optimizer; replicated: the ranks share "
                   "out the steps of Lockstep's; shared: so they do, of parameters that lie once in shared memory")
        ->check(CLI::IsMember({"none", "replicated", "shared"}));
    app.add_option("--seed", seed, "Seed of initial weights and shuffle");
    auto* const virtuals =
        app.add_option("--virtual-ranks", virtual_ranks,
                       "Same bits on any number of ranks up to this one (docs/exactness.md); 0: as the launcher says")
            ->check(CLI::NonNegativeNumber);
    app.add_option("--data", data, "Folder of the four IDX files, gzip or raw");
    app.add_option("--run-dir", run_dir, "Folder of the checkpoint (else the launcher's, or runs/train_fashion_mnist)");
    auto* const old = app.add_option("--resume", resume, "Checkpoint, or the run folder that holds it, to resume from");
    machines.add_to(app)->excludes(virtuals)->excludes(old);
    app.add_option("--memory-every", memory_every, "Save to the launcher's memory every so many steps; 0: never")
        ->check(CLI::NonNegativeNumber);
    app.add_option("--die-at", die_at, "Step in which --die-rank kills itself, before a restart; 0: none")
        ->check(CLI::NonNegativeNumber);
    app.add_option("--die-rank", die_rank, "The rank that dies")->check(CLI::NonNegativeNumber);
    app.add_option("--json", json, "File for the figures of the run");
    app.add_option("--backend", backend, "Engine of the collectives (docs/backends.md; else the best that fits)");
    app.footer(lockstep::kRanksHelp);
  }
};
