#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <lockstep/context.h>
#include <lockstep/group.h>
#include <lockstep/replica.h>
#include <lockstep/state_dict.h>

namespace lockstep {

/// How numbers travel between machines. The integers have one scale for each block of 64 numbers: the block's largest
/// magnitude over 127 (kInt8) or 7 (kInt4), rounded up to bfloat16; each number is rounded to the nearest multiple of
/// the scale. kBFloat16 rounds to nearest even, and to the largest finite number instead of infinity.
enum class Wire { kFloat32, kBFloat16, kInt8, kInt4 };

/// All ranks must use the same values.
struct DiLoCoOptions {
  int64_t sync_every = 100;  ///< steps between two turns of a fragment, H in the papers
  /// Parts of the model, of about equal size, that take turns: one every sync_every / fragments steps. At most one for
  /// each parameter that requires grad.
  int64_t fragments = 1;
  /// Steps between sending a fragment and applying the result, during which training continues; below sync_every. 0:
  /// step() waits for the result.
  int64_t overlap_steps = 0;
  /// With overlap_steps: a parameter becomes mixing * own + (1 - mixing) * outer, where `own` is the machine's value.
  /// From 0 to 1.
  double mixing = 0.5;
  Wire wire = Wire::kFloat32;
  /// Adds the rounding error of `wire` to the values that the machine sends of the fragment next time.
  bool error_feedback = false;
  /// SGD on the pseudo-gradients. `nesterov` has no effect without momentum.
  double outer_lr = 0.7;
  double outer_momentum = 0.9;
  bool nesterov = true;
  /// Rounds in a row in which the parameters of all machines are not finite, after which step() and finish() throw
  /// Error on all ranks instead of a warning, since nothing is learned any more. At least 1.
  int64_t max_nonfinite_rounds = 3;
  /// Makes another outer optimizer for the tensors that it is given, which are float and on the CPU; the options above
  /// are not used then. It must be elementwise, and one whose state lockstep::state_dict() knows. Called once for each
  /// fragment, on every rank.
  std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>& parameters)> outer_optimizer{};
};

/// Counts of a DiLoCo's work so far. Machines are numbered by their first ranks.
struct DiLoCoStats {
  int64_t steps = 0;                         ///< calls of step()
  int64_t rounds = 0;                        ///< turns of fragments whose result was applied
  int64_t bytes_sent = 0;                    ///< by this rank to other machines, after construction
  double wait_seconds = 0;                   ///< that step() and finish() waited on this rank for other machines
  std::vector<bool> took_part{};             ///< by machine: in the last round
  std::vector<int64_t> rounds_by_machine{};  ///< rounds in which each took part
};

/// Trains one model on several machines that exchange little (DiLoCo, Douillard et al. 2023; with fragments and overlap
/// Streaming DiLoCo, Douillard et al. 2025). Within a machine a DistributedDataParallel keeps the replicas equal in
/// every step. Every `sync_every` steps machines exchange pseudo-gradients, the differences between the outer copy of
/// the parameters, which is equal on all machines, and the machine's own; the outer optimizer steps the copy by their
/// mean; and every machine goes on from it.
///
///     lockstep::DistributedDataParallel model(net, context.group().on_this_machine());
///     lockstep::DiLoCo diloco(model, context, {.sync_every = 100, .wire = lockstep::Wire::kInt8});
///     ...
///     optimizer.step();
///     diloco.step();
///     ...
///     diloco.finish();                                    // all machines have the same model
///
/// Each rank of a machine holds a slice of the outer copy and its optimizer's state, and exchanges it with the ranks
/// that hold the slice on the other machines: a machine sends each number once. Means are taken in the order of the
/// machines, with the same bits on all of them, whatever the engine. With more than two machines, each adds up a part
/// of each slice, and the mean is rounded to the wire as well.
///
/// Parameters that require grad are float, bfloat16 or float16; the outer copy is float and on the CPU. Frozen
/// parameters and buffers stay with each machine; synchronise() and finish(), and with `lockstep run --islands` but
/// without overlap_steps each round of the first fragment, average floating-point buffers, those of machines that have
/// only finite ones; without --islands, not those of a model with BufferPolicy::kNone. The optimizer's state stays with
/// each machine, too. A schedule, clipping and accumulation work as without it. An Ema averages each machine's own
/// weights, so its averages differ by machine, also after finish().
///
/// A machine whose parameters are not finite at a fragment's turn is left out of the round: a warning and stats() name
/// it, and it takes all parameters from the outer copy. If it is so with all machines, max_nonfinite_rounds of a
/// fragment in a row, that is an Error on all ranks. Its optimizer's state stays as it is, so give the model
/// NonFinitePolicy::kSkip if an optimizer would remember NaN.
///
/// Every rank makes it, with the same options and model, and makes the same calls in the same order; a difference is an
/// Error on all ranks. `model` outlives it. Used by one thread.
class DiLoCo {
 public:
  /// Sets parameters and buffers to rank 0's; with `lockstep run --islands`, whose machines are runs of their own, to
  /// those of the machine's rank 0, and the first step() sets them to one machine's, plus what was trained before it.
  /// Let all machines initialise their models alike. `model`: over ranks of one machine. `group`: all ranks of all
  /// machines.
  /// TORCH_CHECK fails for options out of range, for parameters of another dtype, and if `model` has a DiLoCo.
  DiLoCo(Replica& model, const Group& group, DiLoCoOptions options = {});
  DiLoCo(Replica& model, const Context& context, DiLoCoOptions options = {})
      : DiLoCo(model, context.group(), std::move(options)) {}
  DiLoCo(DiLoCo&&) noexcept;
  DiLoCo& operator=(DiLoCo&&) = delete;
  /// Warns if parameters have been trained since their last round, unless finish() or state_dict() came after them.
  ~DiLoCo();

  /// After each step of the optimizer, also of one that a GradScaler or NonFinitePolicy skipped: machines count calls,
  /// so that they remain in step. Returns whether parameters were synchronised. Sends nothing if it is no fragment's
  /// turn. Throws Error on all ranks if the machines are at different steps (with --islands each counts its own), if
  /// the ranks of a machine have different parameters, if the machines' outer copies differ because they have loaded
  /// other states, or if a machine's model was changed by refresh() or one of its parameters was frozen: make a new
  /// DiLoCo then. With overlap_steps it throws when the round's result is due.
  bool step();
  /// Ends the rounds under way, and has a round now of what was trained since: afterwards all machines have the same
  /// parameters and floating-point buffers; with `lockstep run --islands` those that take part in the round. To be
  /// called before the model is evaluated or saved for use. Throws Error on all ranks if not all machines call it, at
  /// the same step and after the same rounds; with --islands the other machines take part at their next turns.
  void synchronise();
  /// synchronise() at the end of the training. With --islands the machine leaves the rounds, and step() throws Error.
  void finish();

  [[nodiscard]] DiLoCoStats stats() const;

  /// This rank's slice of the outer copy and of the outer optimizer's state, what rounding lost, the steps, and the
  /// rounds under way, whose results are waited for. For Checkpointer::add; between rounds machines hold different
  /// weights, so the model and its optimizer need Checkpointer::Scope::kEachRank. Every rank calls it.
  [[nodiscard]] StateDict state_dict();
  /// The reverse, on as many machines and ranks, whose parameters are loaded from the checkpoint as well. Throws Error
  /// before anything is changed if the state is of another model, or of other options.
  void load_state_dict(const StateDict& state);
  /// As above, from the states of other machines or ranks, in rank order. It sets the parameters, too: to
  /// the outer copy. Every rank calls it.
  void load_from_ranks(const std::vector<StateDict>& ranks);
  /// Whether load_state_dict() takes such a state: one of as many ranks, on machines as these. The same on all ranks.
  [[nodiscard]] bool fits_ranks(const StateDict& state) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Averages the parameters of all machines every `sync_every` steps: a DiLoCo whose outer optimizer is SGD with a
/// learning rate of 1 and no momentum.
class LocalSGD : public DiLoCo {
 public:
  LocalSGD(Replica& model, const Group& group, int64_t sync_every)
      : DiLoCo(model, group, {.sync_every = sync_every, .outer_lr = 1, .outer_momentum = 0}) {}
  LocalSGD(Replica& model, const Context& context, int64_t sync_every) : LocalSGD(model, context.group(), sync_every) {}
};

}  // namespace lockstep
