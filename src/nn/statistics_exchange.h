#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

namespace lockstep {

/// How synchronised layers over one group exchange their statistics: over a subgroup of all its ranks, so that their
/// messages cannot be confused with those of a reduction of gradients, whatever the order on each rank.
///
/// Within join(), a rank that has run out of inputs does not know what the others run next: a layer's forward or
/// backward, with some number of channels, or a reduction of gradients. So within join() all messages have the same
/// size, that of the widest layer, and begin with what they are. A rank without inputs answers with a row of zeros
/// until a reduction is announced, in which it takes part, or no rank has inputs any more.
struct StatisticsExchange {
  /// The exchange of `group`. The first call makes it, for as long as the group exists: every rank must call.
  static std::shared_ptr<StatisticsExchange> of(const Group& group);
  /// The same if there is one, else null.
  static std::shared_ptr<StatisticsExchange> find(const Group& group);

  explicit StatisticsExchange(const Group& of);

  /// Each layer calls it when it is made; all ranks make the same layers.
  void expect(int64_t channels);

  /// Returns [world size, n], double: row r is rank r's `row`, [n] with n at most 2 * channels + 1 of the widest layer.
  /// The row of a rank that has run out of inputs is zeros. Every rank calls it, or serve().
  at::Tensor gather(const at::Tensor& row);
  /// Returns [n]: the sum over the ranks, in rank order.
  at::Tensor sum(const at::Tensor& row);

  /// All ranks call it, at the beginning and the end of join().
  void set_joining(bool joining) { joining_ = joining; }
  /// Within join(), called by a rank that has inputs: gradients are reduced next.
  void announce_reduction();
  /// Within join(), called by a rank that has none: answers until gradients are reduced or no rank has inputs.
  void serve();

  const Group group;

 private:
  enum class Kind { kShadow, kStatistics, kReduction };
  struct Table {
    at::Tensor rows;         ///< [world size, n]
    bool reduction, inputs;  ///< whether some rank reduces; whether some rank has inputs
  };
  Table exchange(Kind kind, const at::Tensor& row);

  bool joining_ = false;
  int64_t most_channels_ = 0;
};

}  // namespace lockstep
