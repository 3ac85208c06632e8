#pragma once

#include <string>
#include <string_view>
#include <type_traits>

namespace lockstep {

/// Says what the collectives that this thread starts while the label lives are for, such as "the divergence check" or
/// "main_first()": what is a function's name, and only that, ends with "()". The rank's page shows it beside the
/// collective, for reports of what a rank did last, and so do the errors of ranks that called different collectives.
/// Ranks that gather bytes must have equal labels (group_objects.cpp). The innermost label counts.
class OperationLabel {
 public:
  /// `text` must outlive the label. A page has room for 127 bytes.
  explicit OperationLabel(std::string_view text) : before_(current_) { current_ = text; }
  /// It would not.
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
