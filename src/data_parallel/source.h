#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/named_tensors.h>

namespace torch::jit {
struct Module;
}

namespace lockstep {

/// A replica's view of its model: lists the parameters and buffers that the model holds now. A tensor with several
/// names in a module is listed once, under the first. A list that the user passed is returned unchanged.
class Source {
 public:
  virtual ~Source() = default;
  virtual NamedTensors parameters() const = 0;
  virtual NamedTensors buffers() const { return {}; }
  virtual bool is_training() const { return true; }
  /// The call that attaches to it, for messages: a literal.
  virtual const char* attaching_call() const { return "DistributedDataParallel()"; }
  /// LibTorch's layers with their options, one per line, which ranks must have in common besides tensors.
  virtual std::string layers() const { return ""; }
  /// Whether it is a list that the user passed, in which replaced tensors cannot be detected.
  virtual bool is_list() const { return false; }

  /// Whether layers, parameters or buffers were added, replaced or removed since remember(). Each call inspects the
  /// next part of a large module, so it takes microseconds, and finds a change within a few calls.
  virtual bool is_edited() { return false; }
  virtual void remember() {}
};

std::unique_ptr<Source> source_of(std::shared_ptr<torch::nn::Module> module);
std::unique_ptr<Source> source_of(const torch::jit::Module& module);
std::unique_ptr<Source> source_of(NamedTensors parameters);

}  // namespace lockstep
