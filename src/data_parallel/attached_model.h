#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/named_tensors.h>

#include "base/shared_weights.h"
#include "data_parallel/source.h"
#include "data_parallel/untrained_watch.h"
#include "reducer/gradient_hook.h"

namespace lockstep {

/// A model's tensors as they were attached, and the edits made to the model since.
class AttachedModel {
 public:
  /// A parameter as it was when attached. None of this may change without refresh().
  struct Known {
    std::string name;
    at::Tensor tensor;
    at::TensorOptions options;
    int64_t elements;
    bool followed;
    size_t own_handles = 0;  ///< on a list's tensor, of this library; 0: unknown
  };
  /// The current contents of lists and modules.
  struct Tensors {
    NamedTensors parameters, buffers;
    NamedTensors followed;                                         ///< parameters, in the reducer's order
    std::unordered_map<const c10::TensorImpl*, size_t> handles{};  ///< of this library, on a list's tensors
  };

  /// `ignored` names tensors to leave alone. `unfollowed` is called in a backward that reaches a parameter that is not
  /// followed. `watches_untrained` is true on one rank.
  AttachedModel(const std::vector<std::string>& ignored, std::function<void()> unfollowed, bool watches_untrained)
      : ignored_(ignored), unfollowed_(std::move(unfollowed)), watches_untrained_(watches_untrained) {}

  const Source& source() const { return *source_; }
  const std::vector<Known>& known() const { return known_; }
  const NamedTensors& buffers() const { return buffers_; }
  /// The followed parameters, in the reducer's order.
  const NamedTensors& trained() const { return trained_; }
  bool is_known(const at::Tensor& tensor) const { return impls_.contains(tensor.unsafeGetTensorImpl()); }

  NamedTensors parameters_of(const Source& source) const { return without_ignored(source.parameters()); }
  NamedTensors buffers_of(const Source& source) const { return without_ignored(source.buffers()); }
  /// Attaches these tensors. `from`: null, or another source.
  void attach(std::unique_ptr<Source> from, const Tensors& now);

  /// A hash of the followed parameters that the last inspect() found frozen; 0 if there were none.
  uint64_t frozen() const { return seen_.frozen; }
  std::vector<std::string> frozen_names() const;
  /// The changes to the model since attach(), or the trouble set by leave(); empty if none.
  std::string inspect();
  /// Makes inspect() report the trouble of these weights while it lasts.
  void leave(std::shared_ptr<const SharedWeights> wrong) { left_ = std::move(wrong); }
  /// Announces tensors that the source is about to hold: inspect() checks that it does, and a backward that reaches
  /// only them is noticed.
  void expect(const std::vector<at::Tensor>& tensors);
  /// Sets alarms on parameters of the module that are not followed. Called before a backward.
  void watch_strangers();
  /// A parameter of a list that only this library still holds, so that it cannot be trained; empty if none.
  std::string left_behind() const;
  /// The derived object has one more handle on each of these tensors; null: it has handed them out.
  void set_kept_list(const NamedTensors* list);
  std::string untrained_warning() { return untrained_.after_reduction(); }

 private:
  NamedTensors without_ignored(NamedTensors tensors) const;
  std::unique_ptr<GradientAlarm> alarm_on(const at::Tensor& tensor) const {
    return std::make_unique<GradientAlarm>(tensor, unfollowed_);
  }

  const std::vector<std::string>& ignored_;
  const std::function<void()> unfollowed_;
  const bool watches_untrained_;
  std::unique_ptr<Source> source_;
  std::vector<Known> known_;
  NamedTensors buffers_;
  NamedTensors trained_;
  std::unordered_set<const c10::TensorImpl*> impls_;  ///< of known parameters and buffers
  std::unordered_set<const c10::TensorImpl*> kept_list_;
  std::shared_ptr<const SharedWeights> left_;  ///< or null
  struct Seen {
    bool edited = false;  ///< the source has reported an edit, and is not asked again
    uint64_t frozen = 0;  ///< see frozen()
  } seen_;
  // Without these, a backward that reaches one of them but no followed parameter would go unnoticed.
  std::vector<std::unique_ptr<GradientAlarm>> frozen_;     ///< known but not followed: may be unfrozen
  std::vector<std::unique_ptr<GradientAlarm>> strangers_;  ///< added since
  UntrainedWatch untrained_;
};

}  // namespace lockstep
