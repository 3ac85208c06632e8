#pragma once

#include <lockstep/cxx20.h>

#include <concepts>
#include <cstdint>
#include <optional>
#include <vector>

#include <lockstep/group.h>
#include <lockstep/named_tensors.h>
#include <lockstep/state_dict.h>

namespace lockstep {

struct ReplayBufferOptions {
  /// Samples that this rank keeps; the oldest make room for new ones.
  int64_t capacity = 100'000;
  /// Samples that sample() draws on this rank.
  int64_t batch_size = 64;
  /// Seed of the draws. Unset: the context's; 0 with a Group.
  std::optional<uint64_t> seed{};
};

/// A rank's own experience, for off-policy reinforcement learning: each rank adds what its environments went through,
/// and draws its part of a batch from that.
///
///     lockstep::ReplayBuffer experience({{"observation", torch::empty({4})}, {"reward", torch::empty({})}}, context,
///                                       {.capacity = 50'000, .batch_size = 32});
///     experience.add({{"observation", observations}, {"reward", rewards}});    // [n, 4] and [n]
///     auto batch = experience.sample();                                        // ["observation"]: [32, 4]
///     checkpointer.add("experience", experience);                              // each rank's
///
/// A draw depends only on the seed, the rank, the number of calls of sample() so far and the samples in the
/// buffer. So a run that resumes from a checkpoint draws what it would have drawn. Nothing but the constructor
/// communicates. Used by one thread at a time.
class ReplayBuffer {
 public:
  /// `columns`: of one sample, for names, shapes, dtypes and devices; their values do not count. Every rank of the
  /// group calls it. Throws Error on all ranks if columns or options differ by rank, and c10::Error for no column, a
  /// name that is empty or occurs twice, a sparse column, and a capacity or a batch size below 1.
  ReplayBuffer(const NamedTensors& columns, const Group& group, ReplayBufferOptions options = {});
  template <typename Context>
  requires requires(const Context& context) {
    { context.group() } -> std::convertible_to<const Group&>;
    { context.seed() } -> std::convertible_to<uint64_t>;
  }
  ReplayBuffer(const NamedTensors& columns, const Context& context, ReplayBufferOptions options = {})
      : ReplayBuffer(columns, context.group(), with_seed(options, context.seed())) {}

  /// Adds n samples, in the order of their age: of each column [n, shape...]. Ranks may add different numbers, and
  /// none. TORCH_CHECK fails, and nothing is added, for other columns, shapes or dtypes than the constructor's, and for
  /// numbers of samples that differ between columns.
  void add(const NamedTensors& samples);

  /// batch_size samples, each drawn from all that the buffer has, with replacement: of each column [batch_size,
  /// shape...], in tensors of their own. TORCH_CHECK fails while the buffer is empty.
  StateDict sample();

  /// Samples in the buffer, and samples that were ever added.
  int64_t size() const { return size_; }
  int64_t added() const { return added_; }
  /// Calls of sample().
  int64_t draws() const { return draws_; }

  /// This rank's samples, the oldest first, and its counts.
  StateDict state_dict() const;
  /// The reverse. If the buffer has less room now, the newest samples are kept. Throws Error, before anything is
  /// changed, listing the columns that are missing, unknown or of another shape or dtype.
  void load_state_dict(const StateDict& state);
  /// For a resume on another number of ranks: deals the samples of the ranks that saved out to the present ones, by
  /// age, and goes on with the largest number of draws. Throws as load_state_dict().
  void load_from_ranks(const std::vector<StateDict>& ranks);

 private:
  static ReplayBufferOptions with_seed(ReplayBufferOptions options, uint64_t seed) {
    if (!options.seed) options.seed = seed;
    return options;
  }
  void check(const StateDict& state) const;
  void clear();
  /// The rows where samples lie, given their numbers from the oldest on.
  at::Tensor rows_of(const at::Tensor& numbers) const;

  const ReplayBufferOptions options_;
  const int rank_, world_size_;
  StateDict columns_;  ///< each [capacity, shape...]
  int64_t size_ = 0, added_ = 0, draws_ = 0;
  int64_t oldest_ = 0;  ///< its row
};

}  // namespace lockstep
