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

/// Handles `--ranks N` among a program's arguments. Does not return in that case, because the process becomes the
/// launcher of the ranks. Throws Error if this process is already a rank.
void start_ranks_if_asked(int argc, const char* const* argv);

}  // namespace lockstep
