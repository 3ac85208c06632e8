#pragma once

namespace lockstep::diloco {

/// Marks a model as the one of a DiLoCo while it exists. Of a process, whose threads may be ranks.
class Claim {
 public:
  /// `model`: any address that is no other model's while the claim exists.
  explicit Claim(const void* model);
  ~Claim();
  Claim(const Claim&) = delete;

  static bool exists(const void* model);

 private:
  const void* const model_;
};

}  // namespace lockstep::diloco
