#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// What every rank tells all others with each reduction. It rides behind the gradients of the last bucket, as small
/// numbers that every floating point dtype holds exactly: each rank has a row of its own and leaves the others at zero,
/// so that after the reduction every rank knows every rank's.
struct Facts {
  bool active = true;    ///< false: out of inputs, it takes part for the others' sake
  bool skipped = false;  ///< its share of this step is left out
  bool spoiled = false;  ///< but a part of it had been sent before
  bool joining = false;  ///< within join(), where ranks may become inactive
  bool trouble = false;  ///< it found an error that all ranks must hear of
  bool late = false;     ///< it has gradients that came after their bucket had been launched
  int passes = 1;        ///< backward passes since the last reduction: 0, or 1 to 255 and again from 1
  int object = 0;        ///< which of the group's replicas it reduces, modulo 256
  double weight = 1;
  /// Its gradients count.
  bool took_part() const { return active && !skipped; }
  bool operator==(const Facts&) const = default;
};

/// Whether skipping has left nothing of a reduction: all ranks skipped, or one had sent a part of its share before. It
/// leaves no gradient on any rank.
bool is_void(const std::vector<Facts>& ranks);
/// A rank whose gradients count; there is one.
int first_that_took_part(const std::vector<Facts>& ranks);

/// Elements of one rank's row.
inline constexpr int64_t kFactElements = 22;

/// Fills `table`, world_size * kFactElements elements in a row, with this rank's row and zeros.
void write_facts(const at::Tensor& table, int rank, const Facts& facts);

/// All ranks' facts from the table after the reduction: the sum over the ranks or, if `averaged`, their mean.
std::vector<Facts> read_facts(const at::Tensor& table, bool averaged);

}  // namespace lockstep
