#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

#include "nn/exchange_watch.h"

namespace lockstep {

enum class Pass { kForward, kBackward };

/// The exchange of statistics between synchronised layers over one group. It uses a subgroup of all its ranks, so that
/// its messages cannot be confused with those of a reduction of gradients, whatever the order on each rank.
///
/// Each message begins with its kind: a layer's forward or backward. If ranks are at different ones, all throw an Error
/// that names them. They also throw if some ranks run a layer while others wait for them elsewhere (ExchangeWatch).
///
/// Within join(), a rank without inputs does not know what the others run next: a layer's forward or backward, with
/// some number of channels, or a reduction of gradients. So within join() all messages have the widest layer's size. A
/// rank without inputs answers with a row of zeros until a reduction is announced, in which it takes part, or until no
/// rank has inputs.
class StatisticsExchange {
 public:
  static constexpr int64_t kHeader = 5;  ///< numbers at the start of each row: kind, place, length, eps, momentum

  /// The exchange of `group`. The first call makes it, for the lifetime of the group.
  /// REQUIRES: every rank makes the first call.
  static std::shared_ptr<StatisticsExchange> of(const Group& group);
  /// The existing exchange of the group; null if none.
  static std::shared_ptr<StatisticsExchange> find(const Group& group);

  explicit StatisticsExchange(const Group& of);

  /// Registers a layer and returns its number. `name` is "batch norm `features.1`", or empty for "a SyncBatchNorm of 8
  /// channels". All ranks make the same layers in the same order.
  int64_t add_layer(const std::string& name, int64_t channels);
  std::string name_of(int64_t layer, int64_t channels) const;

  /// Gathers the values of all ranks for a layer's pass: [world size, kHeader + n], double, in CPU memory. `row`,
  /// [kHeader + n] with n = 2 * channels + 1, has this rank's values after its header, which is filled in here. A rank
  /// without inputs has a row of zeros.
  /// REQUIRES: every rank calls it, or serve().
  at::Tensor gather(int64_t layer, Pass pass, const at::Tensor& row);

  /// REQUIRES: all ranks call it, at the beginning and the end of join().
  void set_joining(bool joining) { joining_ = joining; }
  /// Called within join() by a rank with inputs: gradients are reduced next.
  void announce_reduction();
  /// Called within join() by a rank without inputs. Answers until gradients are reduced or no rank has inputs.
  void serve();

  const Group group;

 private:
  enum class Kind { kShadow, kStatistics, kReduction };
  struct Table {
    at::Tensor rows;         ///< [world size, kHeader + n]
    bool reduction, inputs;  ///< whether some rank reduces; whether some rank has inputs
  };
  at::Tensor send(const std::string& name, const std::string& place, const at::Tensor& row);
  Table exchange_within_join(Kind kind, const std::string& name, const std::string& place, const at::Tensor& row);
  std::string place_of(const double* row) const;
  /// ", layer 1 of 2 with that name", counted as they were made; empty if no other has its name.
  std::string number_of(int64_t layer) const;
  void check_same_place(const std::string& name, const at::Tensor& rows) const;

  bool joining_ = false;
  int64_t most_channels_ = 0;
  std::vector<std::string> names_;      ///< of the layers
  std::optional<ExchangeWatch> watch_;  ///< none in a world of one
};

/// One layer's part in an exchange.
struct LayerExchange {
  LayerExchange(std::shared_ptr<StatisticsExchange> of, const std::string& name, int64_t channels)
      : exchange(std::move(of)), number(exchange->add_layer(name, channels)) {}

  int world_size() const { return exchange->group.world_size(); }

  const std::shared_ptr<StatisticsExchange> exchange;
  const int64_t number;
};

}  // namespace lockstep
