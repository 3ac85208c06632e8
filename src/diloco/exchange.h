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
#include "diloco/statements.h"

namespace lockstep::diloco {

/// The numbers of a slice, rounded up so that it can be cut into equal parts of whole blocks, one for each machine.
int64_t padded_slice(int64_t elements, int machines);

/// One slice of a fragment on its way to the mean over the machines that take part.
///
/// Two machines send each other everything. More send each part of the slice to one of them, which adds it up, rounds
/// the mean to the wire, and sends it to all. Either way every machine decodes the same bytes, and sums are taken in
/// double, in the order of the machines.
class Exchange {
 public:
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
  /// values := the mean of the part of each machine's message that lies in `received`.
  void add_up(const Machines& machines, float* values) const;

  std::optional<Statements> statements_;
  Stage stage_ = Stage::kSlices;
  Wire wire_ = Wire::kFloat32;
  int64_t part_ = 0;  ///< numbers in a message
  at::Tensor sent_, received_;
  std::optional<Work> work_;
  std::optional<Outcome> outcome_;
  at::Tensor mean_;
  int64_t bytes_sent_ = 0;
};

}  // namespace lockstep::diloco
