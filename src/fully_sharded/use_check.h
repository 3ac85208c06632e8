#pragma once

#include <string>
#include <vector>

#include <lockstep/group.h>

namespace lockstep::fully_sharded {

/// Tells whether ranks that use units together use the same ones in the same order. Units may be of one size, so their
/// memory alone does not say.
class UseCheck {
 public:
  enum class What { kForward, kBackward, kGradients };
  /// A word of each rank, under way.
  struct Sent {
    at::Tensor mine, all;
    Work work;
  };

  /// `model`: its number among the group's models.
  UseCheck(std::vector<std::string> units, int rank, int model)
      : units_(std::move(units)), rank_(rank), model_(model) {}

  int model() const { return model_; }
  /// This rank is about to do this, its next common thing. Every rank of `group` calls it.
  Sent send(const Group& group, size_t unit, What what);
  /// Returns when all have said so. Throws on every rank if they did not all say the same.
  void finish(const Sent& sent) const;
  /// The same, and then waits for what was begun after it, whose failure says less.
  void finish_before(const Sent& sent, const Work& work) const;
  void meet(const Group& group, size_t unit, What what) { finish(send(group, unit, what)); }

 private:
  std::string text_of(int64_t word) const;

  const std::vector<std::string> units_;
  const int rank_, model_;
  int64_t uses_ = 0;
};

}  // namespace lockstep::fully_sharded
