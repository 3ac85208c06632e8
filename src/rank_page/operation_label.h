#pragma once

#include <string>
#include <string_view>
#include <type_traits>

namespace lockstep {

/// Gives the purpose of the collectives that this thread starts while the label lives, such as "the divergence check"
/// or "main_first()". Only the names of functions end with "()". The rank's page shows it next to the collective, for
/// reports of what a rank did last, and so do the errors of ranks that called different collectives. Ranks that gather
/// bytes must have equal labels (group_objects.cpp). The innermost label counts.
class OperationLabel {
 public:
  /// REQUIRES: `text` outlives the label. A page has room for 127 bytes.
  explicit OperationLabel(std::string_view text) : before_(current_) { current_ = text; }
  /// A temporary text would not outlive the label.
  template <typename Text>
  requires std::is_same_v<Text, std::string>
  explicit OperationLabel(Text&& text) = delete;
  ~OperationLabel() { current_ = before_; }
  OperationLabel(const OperationLabel&) = delete;

  /// This thread's label; empty if it has none.
  static std::string_view current() { return current_; }

 private:
  /// Not initialized to zeros: if .tbss is a program's only thread-local section, mold 1.10 maps the last page of its
  /// code as data.
  inline static thread_local constinit std::string_view current_{""};  // NOLINT(readability-redundant-string-init)
  const std::string_view before_;
};

}  // namespace lockstep
