#pragma once

#include <string>
#include <vector>

#include <lockstep/group.h>

namespace lockstep::fully_sharded {

/// Checks that ranks that use units together use the same ones in the same order. Units may be of equal size, so their
/// memory does not show it.
class UseCheck {
 public:
  enum class What { kForward, kBackward, kGradients };
  /// A word of each rank, in flight.
  struct Sent {
    at::Tensor mine, all;
    Work work;
  };

  /// `model` is its number among the group's models.
  UseCheck(std::vector<std::string> units, int rank, int model)
      : units_(std::move(units)), rank_(rank), model_(model) {}

  int model() const { return model_; }
  /// Tells the others the next common action of this rank.
  /// REQUIRES: every rank of `group` calls it.
  Sent send(const Group& group, size_t unit, What what);
  /// Returns when all ranks have sent theirs. Throws on every rank if they differ.
  void finish(const Sent& sent) const;
  /// finish(), followed by a wait for work started later, whose failure would say less.
  void finish_before(const Sent& sent, const Work& work) const;
  void meet(const Group& group, size_t unit, What what) { finish(send(group, unit, what)); }

 private:
  std::string text_of(int64_t word) const;

  const std::vector<std::string> units_;
  const int rank_, model_;
  int64_t uses_ = 0;
};

}  // namespace lockstep::fully_sharded
