#pragma once

#include <concepts>
#include <exception>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>

#include <lockstep/data_loader.h>
#include <lockstep/metrics.h>

namespace torch::nn {
class Module;
}

namespace lockstep {

/// While it lives, the module is in evaluation mode. Then each submodule returns to its earlier mode.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& module);
  ~EvaluationMode();
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  torch::nn::Module& module_;
  std::vector<bool> was_training_;  // the module's, then those of its submodules, from the outermost inwards
};

namespace detail {
/// Throws c10::Error on every rank for misuse, and Error on all ranks if their loaders differ.
void check_evaluation(const LoaderBase& loader, const Group& group);
}  // namespace detail

/// Calls `step(batch)` for every batch of `loader`, without autograd, and reduces `metrics`. The results are exact over
/// all ranks, however uneven their shares.
///
///     lockstep::DataLoader test(..., context, {.batch_size = 500, .exactly_once = true});
///     lockstep::evaluate(*net, test, context.group(), metrics, [&](lockstep::Batch& batch) {
///       accuracy.update(net(batch.data), batch.target);
///     });
///
/// Every rank must call it. Its collectives run before the loop, where loaders are compared, and after it. `loader` is
/// a DataLoader or an ExampleLoader. If `step` or the loader throws on one rank, that rank rethrows the exception, and
/// all others throw an Error that names the rank.
/// REQUIRES: `loader` was made with `exactly_once` and with the ranks of `group`. `step` calls no collectives, because
/// ranks may have different numbers of batches.
template <std::derived_from<LoaderBase> Loader, std::invocable<typename Loader::Iterator::value_type&> Step>
void evaluate(Loader& loader, const Group& group, Metrics& metrics, Step&& step) {
  detail::check_evaluation(loader, group);
  metrics.reset();
  std::exception_ptr failure;
  try {
    const at::NoGradGuard no_grad;
    for (auto& batch : loader) step(batch);
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure == nullptr) return metrics.reduce(group);
  metrics.reduce_failed(group);
  std::rethrow_exception(failure);
}

/// evaluate() while `module` is in evaluation mode.
template <std::derived_from<LoaderBase> Loader, std::invocable<typename Loader::Iterator::value_type&> Step>
void evaluate(torch::nn::Module& module, Loader& loader, const Group& group, Metrics& metrics, Step&& step) {
  const EvaluationMode mode(module);
  evaluate(loader, group, metrics, std::forward<Step>(step));
}

}  // namespace lockstep
