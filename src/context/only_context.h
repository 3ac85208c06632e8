#pragma once

namespace lockstep {

/// Held by the Context of a process while it exists. Throws Error if the process already has one.
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
