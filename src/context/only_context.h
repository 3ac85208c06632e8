#pragma once

namespace lockstep {

/// Held by the Context of a process while it is there. Throws Error where the process has one already.
class OnlyContext {
 public:
  OnlyContext();
  OnlyContext(OnlyContext&& other) noexcept;
  OnlyContext& operator=(OnlyContext&&) = delete;
  ~OnlyContext();

 private:
  bool holds_ = true;
};

}  // namespace lockstep
