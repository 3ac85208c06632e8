#pragma once

#include <cstdint>
#include <string_view>
#include <thread>
#include <vector>

#include "reducer/gradient_changes.h"
#include "reducer/reduction.h"

namespace lockstep {

/// Facts that all ranks know before an optimizer's step. The gradient is sum / divisor * factor.
struct Settlement {
  std::vector<Facts> ranks;
  std::vector<bool> used;  ///< by parameter: some rank has a gradient for it; other parameters are left alone
  int divisor = 1;
  double factor = 1;
  bool is_void = false;  ///< the step must not change anything, but end_step() must still be called
};

/// The label of a thread that calls settle() to limit the norm; its errors and those of other ranks then name the call.
inline constexpr std::string_view kClipGradNorm = "clip_grad_norm()";

/// Backward only fills the buckets; an optimizer sums them in its step:
///
///   backward     fills buckets; .grad lies in them and holds this rank's own gradients
///   settle()     fills the rest; one small message carries all ranks' facts and which parameters have gradients.
///                When it returns, every rank's buckets are filled
///   the step     reads all ranks' buckets, or distributes the sums
///   end_step()   a barrier if ranks read the others' buckets: after it, no rank reads them
class DeferredReduction final : public Reduction {
 public:
  explicit DeferredReduction(ReductionParts& parts) : parts_(parts), changes_(parts.plan, parts.buckets) {}

  void begin() override;
  void backward_begins() override;
  void before_gradient(size_t parameter) override;
  bool acts_before_gradients() const override { return parts_.plan.rank_zero_adds_it(); }
  void ready(size_t parameter) override;
  void backward_ended() override;
  void reduce() override;
  void skip() override;
  /// Returns none: the facts come with the optimizer's step.
  std::optional<std::vector<Facts>> shadow() override;
  void fail(const std::string& trouble) override;
  bool gradients_wait() const override { return passes_ > 0 && !skips_; }
  /// Whether the next settle() excludes this rank's gradients.
  bool skips() const { return skips_; }

  /// The implementations of Reducer::settle(), is_settled() and end_step().
  Settlement settle(Share share);
  bool is_settled() const { return stage() == Stage::kSettled; }
  void end_step(const Settlement& settlement, bool others_read);

  /// By other code, since backward.
  GradientChanges& changes() { return changes_; }
  /// Takes over from another reducer of the same ranks, whose gradients are now in the buckets.
  void take_over_from(const DeferredReduction& before);

 private:
  /// kBegun: a backward, or its substitute, has begun a reduction. kSettled: settle() has returned. kEnded: end_step()
  /// has returned.
  enum class Stage { kEnded, kBegun, kSettled };

  Stage stage() const { return stage_of_ == parts_.sender.begun() ? stage_ : Stage::kBegun; }
  void reach(Stage stage);
  void set_aside_passes();
  /// Returns the parameters with gradients on this rank.
  std::vector<bool> fill_buckets();
  /// Sets the settlement's `ranks` and `used` to all ranks' values. Returns the sums for
  /// GradientChanges::check_dropped().
  std::vector<float> tell_all_ranks(Settlement& settlement, const std::vector<bool>& dropped);
  void check_same_step(const std::vector<Facts>& ranks) const;
  /// Throws on all ranks if the parameters are a list and a step found neither a backward nor a gradient on any rank.
  void check_reached(const Settlement& settlement) const;

  ReductionParts& parts_;
  GradientChanges changes_;
  int passes_ = 0;               ///< of backward, since the last settle()
  bool compares_passes_ = true;  ///< with those of other ranks, in the next settle()
  bool skips_ = false;           ///< the next settle() excludes this rank's gradients
  bool was_settled_ = false;     ///< when the last reduction began
  Stage stage_ = Stage::kEnded;
  uint64_t stage_of_ = 0;  ///< the number of the reduction that has reached it
  std::thread::id settled_by_;
};

}  // namespace lockstep
