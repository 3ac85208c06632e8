#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

namespace lockstep {

/// How the ranks of the synchronised layers over one group tell each other their statistics: over a subgroup of all its
/// ranks, so that a layer's messages and those of a reduction of gradients cannot meet, whatever the order on each
/// rank.
///
/// Within join() a rank that has run out of inputs does not know what the others run next: a layer's forward or
/// backward, of so many channels, or a reduction of gradients. So there all messages have one size, that of the widest
/// layer, and say first what they are; such a rank answers with a row of zeros until it hears of a reduction, in which
/// it then takes part, or that nobody has inputs any more.
struct StatisticsExchange {
  /// That of `group`, made by the first who asks, for as long as there is the group: every rank must ask.
  static std::shared_ptr<StatisticsExchange> of(const Group& group);
  /// The same if it is there, else null.
  static std::shared_ptr<StatisticsExchange> find(const Group& group);

  explicit StatisticsExchange(const Group& of);

  /// Every layer, when it is made: all ranks make the same.
  void expect(int64_t channels);

  /// [world size, n], double: row r is rank r's `row`, [n] with n at most 2 * channels + 1 of the widest layer. A rank
  /// that has run out of inputs has zeros. Every rank calls it (or serves).
  at::Tensor gather(const at::Tensor& row);
  /// [n]: the sum over the ranks, in their order.
  at::Tensor sum(const at::Tensor& row);

  /// All ranks, at the beginning and the end of join().
  void set_joining(bool joining) { joining_ = joining; }
  /// Within join(), by a rank that has inputs: gradients are reduced next.
  void announce_reduction();
  /// Within join(), by a rank that has none: answers until gradients are reduced, or nobody has inputs.
  void serve();

  const Group group;

 private:
  enum class Kind { kShadow, kStatistics, kReduction };
  struct Table {
    at::Tensor rows;         ///< [world size, n]
    bool reduction, inputs;  ///< some rank reduces; some rank has inputs
  };
  Table exchange(Kind kind, const at::Tensor& row);

  bool joining_ = false;
  int64_t most_channels_ = 0;
};

}  // namespace lockstep
