#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/non_finite_policy.h>

namespace lockstep {

/// Facts that every rank tells all others with each reduction. They follow the gradients of the last bucket, as small
/// numbers that every floating-point dtype represents exactly. Each rank fills its own row and leaves the others zero,
/// so after the reduction every rank has the facts of all.
struct Facts {
  bool active = true;       ///< false: it is out of inputs and takes part only for the others
  bool skipped = false;     ///< it contributes nothing to this step
  bool spoiled = false;     ///< it skips, but has already sent a part of its gradients
  bool idle = false;        ///< an optimizer's step began without a backward since the last one
  bool joining = false;     ///< it is within join(), where ranks may become inactive
  bool trouble = false;     ///< it found an error that all ranks must throw
  bool late = false;        ///< it has gradients that arrived after their bucket was sent
  bool local_step = false;  ///< its parameters changed while gradients waited in .grad
  int passes = 1;           ///< backward passes since the last reduction: 0, or 1 to 255, then 1 again
  int object = 0;           ///< the number of the replica that it reduces, modulo 256
  double weight = 1;
  NonFinitePolicy policy = NonFinitePolicy::kIgnore;
  uint64_t data = 0;       ///< a hash of the passes that loaders have begun since the last reduction; 0: none
  bool odd_shard = false;  ///< one of them reads the shard of another rank
  /// Settings that must be equal on every rank. `checks` and `frozen` are hashes that include the reduction's number,
  /// so different settings may have equal hashes, but not for long.
  struct Settings {
    bool divides_by_active = false;  ///< within join(): the mean is over the active ranks only
    bool throws_early = false;       ///< within join(): the first rank without inputs ends the loop
    int checks = 0;                  ///< how often, and how, replicas are compared; 0 to 255
    int frozen = 0;                  ///< parameters frozen since they were attached: 1 to 255; 0: none
    bool operator==(const Settings&) const = default;
  } settings{};
  /// Whether its gradients count.
  bool took_part() const { return active && !skipped; }
  bool operator==(const Facts&) const = default;
};

/// This rank's contribution to a reduction.
enum class Share { kGradients, kSkipped, kOutOfInputs };

/// Whether a reduction is void: all ranks skipped, or one that skipped had already sent a part of its gradients. No
/// gradient is then left on any rank.
bool is_void(const std::vector<Facts>& ranks);
/// The first rank whose gradients count; there must be one.
int first_that_took_part(const std::vector<Facts>& ranks);

/// Elements of one rank's row.
inline constexpr int64_t kFactElements = 44;

/// The number of backward passes as Facts encode it.
constexpr int facts_of_passes(int passes) { return passes == 0 ? 0 : 1 + (passes - 1) % 255; }

/// Fills `table`, a row of world_size * kFactElements elements, with this rank's row and zeros.
void write_facts(const at::Tensor& table, int rank, const Facts& facts);
/// Fills `table` with the rows of a rank's virtual ranks, from row `first` on.
void write_facts(const at::Tensor& table, int first, const std::vector<Facts>& rows);

/// All ranks' facts from the table after the reduction: the sum over the ranks or, if `averaged`, their mean.
std::vector<Facts> read_facts(const at::Tensor& table, bool averaged);

}  // namespace lockstep
