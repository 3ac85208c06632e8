#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/diloco.h>
#include <lockstep/group.h>

#include "diloco/machines.h"

namespace lockstep::diloco {

/// A machine's statement about itself when it sends a fragment.
enum class Condition : int32_t {
  kTakesPart,
  kNotFinite,  ///< it is left out
  kDiverged,   ///< its ranks have different parameters
  kFrozen,     ///< a parameter does not require grad any more
  kRefreshed,  ///< the model is attached to other tensors now
  kOutOfStep,  ///< its ranks have called step() different numbers of times
};

struct Standing {
  Condition condition = Condition::kTakesPart;
  int32_t detail = 0;  ///< kDiverged: a rank, among all; kFrozen: the place of the parameter in the model
  uint64_t outer = 0;  ///< hash of this rank's slice of the outer copy, which all machines have
};

/// Whose pseudo-gradients the mean is over, or why there is none. The same on all ranks.
struct Outcome {
  std::vector<bool> took_part;  ///< by machine
  std::string error;            ///< empty: the round is good
};

/// The numbers of a slice, rounded up so that it can be cut into equal parts of whole blocks, one for each machine.
int64_t padded_slice(int64_t elements, int machines);

/// One slice of a fragment on its way to the mean over the machines that take part.
///
/// Two machines send each other everything. More send each part of the slice to one of them, which adds it up, rounds
/// the mean to the wire, and sends it to all. Either way every machine decodes the same bytes, and sums are taken in
/// double, in the order of the machines.
class Exchange {
 public:
  /// The place of a fragment in a training: machines that are not at the same one are told.
  struct Place {
    int64_t step, fragment;
    const std::vector<std::string>* names;  ///< of the model's parameters; outlives the exchange
  };

  /// Starts it; every rank of the rail calls it. `values`: padded_slice() floats, which are not read if the machine
  /// does not take part. `rest`: of as many, or undefined; set to what rounding loses.
  Exchange(const Machines& machines, Wire wire, Place place, Standing standing, const at::Tensor& values,
           const at::Tensor& rest);
  /// An exchange that is over, from a checkpoint.
  Exchange(Outcome outcome, at::Tensor mean);

  /// The second half, if there is one. Every rank of the rail calls it, in the same order as other operations of the
  /// rail. `rest`: what rounding means lost before, which is added, and set to what it loses now; or undefined.
  void send_means(const Machines& machines, const at::Tensor& rest);
  /// Waits until the mean is there. The same holds.
  void finish(const Machines& machines, const at::Tensor& rest);

  const Outcome& outcome() const { return *outcome_; }
  /// Undefined if no machine took part, and after an error.
  const at::Tensor& mean() const { return mean_; }
  /// That this rank sends to other machines.
  int64_t bytes_sent() const { return bytes_sent_; }

 private:
  enum class Stage { kSlices, kMeans, kDone };
  /// Reads the heads of all machines.
  void take_outcome(const Machines& machines);
  /// values := the mean of the part of each machine's message that lies in `received`.
  void add_up(const Machines& machines, float* values) const;

  Stage stage_ = Stage::kSlices;
  Wire wire_ = Wire::kFloat32;
  Place place_{};
  int64_t part_ = 0;  ///< numbers in a message
  at::Tensor sent_, received_;
  std::optional<Work> work_;
  std::optional<Outcome> outcome_;
  at::Tensor mean_;
  int64_t bytes_sent_ = 0;
};

}  // namespace lockstep::diloco
