#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

/// The command-line options of machines that train by themselves and synchronise now and then (docs/slow_networks.md).
struct MachineOptions {
  int sync_every = 0;  ///< 0: gradients are reduced over all machines in every step
  int fragments = 1, overlap = 0;
  lockstep::Wire wire = lockstep::Wire::kFloat32;
  double outer_lr = 0.7, outer_momentum = 0.9;

  bool train_separately() const { return sync_every > 0; }
  lockstep::DiLoCoOptions diloco() const {
    return {.sync_every = sync_every,
            .fragments = fragments,
            .overlap_steps = overlap,
            .wire = wire,
            .outer_lr = outer_lr,
            .outer_momentum = outer_momentum};
  }

  /// Returns --sync-every.
  CLI::Option* add_to(CLI::App& app) {
    auto* const every =
        app.add_option("--sync-every", sync_every, "Steps between two synchronisations of machines; else none")
            ->check(CLI::Range(1, std::numeric_limits<int>::max()));
    app.add_option("--fragments", fragments, "Parts of the model that machines synchronise in turns")
        ->capture_default_str()
        ->needs(every);
    app.add_option("--overlap", overlap, "Steps of training while a part travels")->capture_default_str()->needs(every);
    const std::map<std::string, lockstep::Wire> wires{{"fp32", lockstep::Wire::kFloat32},
                                                      {"bf16", lockstep::Wire::kBFloat16},
                                                      {"int8", lockstep::Wire::kInt8},
                                                      {"int4", lockstep::Wire::kInt4}};
    app.add_option("--wire", wire, "How numbers travel between machines: fp32, bf16, int8 or int4")
        ->default_str("fp32")
        ->transform(CLI::CheckedTransformer(wires))
        ->needs(every);
    app.add_option("--outer-lr", outer_lr, "Learning rate of the synchronisations")
        ->capture_default_str()
        ->needs(every);
    app.add_option("--outer-momentum", outer_momentum, "Nesterov momentum of the synchronisations")
        ->capture_default_str()
        ->needs(every);
    return every;
  }
};

namespace machine_options {

/// The ranks whose replicas are equal after every step.
inline lockstep::Group replicas(const MachineOptions& options, const lockstep::Context& context) {
  return options.train_separately() ? context.group().on_this_machine() : context.group();
}

/// What all ranks have sent to other machines. Every rank calls it.
inline int64_t bytes_between_machines(const lockstep::Context& context, int64_t of_this_rank) {
  const torch::Tensor sent = torch::tensor(of_this_rank, torch::kLong);
  context.group().all_reduce(sent);
  return sent.item<int64_t>();
}

/// Adds what the steps depend on. `diloco`: null where machines do not train by themselves.
template <typename Module, typename Model, typename Optimizer>
void add_parts(lockstep::Checkpointer& checkpointer, Module& module, Model& model, Optimizer& optimizer,
               lockstep::DiLoCo* diloco) {
  if (diloco == nullptr) {
    checkpointer.add("model", model).add("optimizer", optimizer);
    return;
  }
  // Machines hold different weights between rounds.
  constexpr auto kEachRank = lockstep::Checkpointer::Scope::kEachRank;
  checkpointer.add("model", module, kEachRank).add("optimizer", optimizer, kEachRank).add("diloco", *diloco);
}

}  // namespace machine_options
