#pragma once

#include <string_view>

namespace lockstep {

/// Says what the collectives are for that this thread starts while the label lives: "the divergence check". It comes
/// to stand on the rank's page beside the collective, for whoever asks what a rank did last. The innermost one counts.
class OperationLabel {
 public:
  /// `text` outlives the label. A page has room for 127 bytes of it.
  explicit OperationLabel(std::string_view text) : before_(current_) { current_ = text; }
  ~OperationLabel() { current_ = before_; }
  OperationLabel(const OperationLabel&) = delete;

  /// Of this thread; empty without one.
  static std::string_view current() { return current_; }

 private:
  /// Not all zeros at the start: where .tbss is the only thread-local section of a program mold 1.10 protects the last
  /// page of its code as data.
  inline static thread_local constinit std::string_view current_{""};  // NOLINT(readability-redundant-string-init)
  const std::string_view before_;
};

}  // namespace lockstep
