#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <lockstep/data_loader_options.h>
#include <lockstep/dataset.h>
#include <lockstep/loader_stats.h>
#include <lockstep/shard.h>

namespace lockstep {

namespace detail {
/// What a loader knows of its batches, whatever their type.
struct BatchType {
  /// Makes one; called on several workers at once.
  std::function<std::shared_ptr<void>(at::ArrayRef<int64_t> indices, Draw& draw)> make;
  /// Shows all tensors of one; null: they are not known.
  std::function<void(void* batch, const std::function<void(at::Tensor&)>& visit)> for_each_tensor;
};
}  // namespace detail

/// What all loaders have in common, whatever their batches are: DataLoader and ExampleLoader.
///
/// Unless `exactly_once` is set, every rank gets the same number of batches of the same sizes, so that a collective in
/// each step meets its partners. The order of batches does not depend on timing or on the number of workers.
///
/// Nothing here communicates. A loader is used by one thread; several passes may be open at once, each with workers of
/// its own, which end with the pass: at its last batch, or when the loop is left early (after the batches then under
/// way). Outside of `epochs`, every pass is a new epoch with a new order, on its own account; inside, all passes of one
/// epoch have the same order.
class LoaderBase {
 public:
  class Epochs;

  /// The numbers `first`, ..., `count` - 1 for a range-for over epochs, where `first` is 0 or what `set_epoch` said
  /// (when training resumes): `count` is the length of the whole training. Each number chooses the shuffle while it
  /// lasts. The loader must outlive the loop and stay where it is. Every rank must use the same numbers.
  Epochs epochs(int count);

  /// Goes on as after `epoch` epochs: the next pass is of this epoch, and so is the first of `epochs`. Not needed
  /// in a loop over `epochs`, and there an error if it names another epoch.
  void set_epoch(int epoch);

  /// Where the newest pass is, for a checkpoint: the epoch, the samples of it that are done on all ranks together (the
  /// batch at hand among them), and what the order depends on, a sampler's state among it. The same on every rank, but
  /// for the last batch of a pass with `exactly_once`: take rank 0's.
  c10::IValue state_dict() const;

  /// Goes on from there, on any number of ranks and with any batch size: the next pass has what is left of the epoch,
  /// each sample that is not done once (and padding as at the end of every epoch). Not inside `epochs`. Throws Error
  /// if dataset, seed or shuffle are others. The next pass throws Error if a sampler then gives another order.
  void load_state_dict(const c10::IValue& state);

  /// Steps of the epoch that the next pass leaves out because they were taken before a checkpoint: as many as this
  /// batch size and this number of ranks would have made of them, rounded up. 0 for a whole epoch.
  int64_t first_step() const;
  /// Batches that the next pass has, on this rank.
  int64_t steps_left() const;

  /// Where the time of the newest pass went; of none, zeros.
  LoaderStats stats() const;

  /// Inside `epochs` the present epoch, else that of the next pass. Counts from 0.
  int epoch() const { return epoch_; }
  /// The count given to the loop over `epochs` that is under way, or 0.
  int epoch_count() const { return epoch_count_; }

  /// Batches in an epoch, on this rank.
  int64_t size() const { return size_; }
  /// Samples in an epoch, on this rank.
  int64_t samples() const { return samples_; }
  /// Samples in the dataset.
  int64_t dataset_size() const { return dataset_size_; }
  const DataLoaderOptions& options() const { return options_; }
  int rank() const { return shard_.rank; }
  int world_size() const { return shard_.world_size; }

  /// Of the newest pass, the batch at hand.
  struct BatchShare {
    int64_t here = 0;          ///< samples on this rank
    int64_t in_all = 0;        ///< on all ranks together, without those that are repeated to even ranks out
    bool on_all_ranks = true;  ///< false: with exactly_once some ranks have fewer batches in this pass
  };
  BatchShare batch_share() const;

 protected:
  struct Pass;
  /// Throws c10::Error for options that make no sense.
  LoaderBase(detail::BatchType type, int64_t dataset_size, const Shard& shard, DataLoaderOptions options);
  /// Starts a pass over this rank's share. Here and in advance(), what the dataset threw for a batch is rethrown in
  /// that batch's turn. The loader stays usable.
  std::shared_ptr<Pass> begin_pass();

 private:
  template <typename B>
  friend class BatchIterator;
  static void advance(Pass& pass);
  static void* current(const Pass& pass);
  static bool ended(const Pass& pass);
  static int64_t samples_of(const Pass& pass);

  int64_t places() const;  ///< of the epoch's order
  std::vector<int64_t> order_of_sampler();
  std::vector<int64_t> indices_of_pass();

  detail::BatchType type_;
  int64_t dataset_size_;
  Shard shard_;
  DataLoaderOptions options_;
  int64_t batch_size_;  // on each rank
  int64_t samples_ = 0;
  int64_t size_ = 0;
  int first_epoch_ = 0;
  int epoch_ = 0;
  int epoch_count_ = 0;  // above 0 while a loop over epochs() is under way
  int64_t start_ = 0;    // places of the next pass that were taken before a checkpoint
  struct Position;
  std::shared_ptr<Position> position_;  // of the newest pass; null before the first
  struct SamplerState;
  std::shared_ptr<SamplerState> sampler_;  // null without a sampler
};

/// Owns a pass: destroying it stops the pass's workers.
template <typename B>
class BatchIterator {
 public:
  using value_type = B;
  using difference_type = std::ptrdiff_t;

  BatchIterator(BatchIterator&&) noexcept = default;
  BatchIterator& operator=(BatchIterator&&) noexcept = default;

  /// The loop may keep or change the batch, or move its tensors away.
  B& operator*() const { return *static_cast<B*>(LoaderBase::current(*pass_)); }
  BatchIterator& operator++() {
    LoaderBase::advance(*pass_);
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t) const { return LoaderBase::ended(*pass_); }
  /// In the batch.
  int64_t samples() const { return LoaderBase::samples_of(*pass_); }

 private:
  friend class DataLoader;
  template <typename>
  friend class ExampleLoader;
  explicit BatchIterator(std::shared_ptr<LoaderBase::Pass> pass) : pass_(std::move(pass)) { ++*this; }
  std::shared_ptr<LoaderBase::Pass> pass_;
};

/// A loop over epochs. Ends when its last epoch is over, or when it is destroyed.
class LoaderBase::Epochs {
 public:
  class Iterator {
   public:
    int operator*() const { return epochs_->loader_->epoch_; }
    Iterator& operator++();
    bool operator==(std::default_sentinel_t) const { return !epochs_->under_way_; }

   private:
    friend class Epochs;
    explicit Iterator(Epochs* epochs) : epochs_(epochs) {}
    Epochs* epochs_;
  };

  Epochs(const Epochs&) = delete;
  Epochs& operator=(const Epochs&) = delete;
  ~Epochs();

  /// Throws c10::Error inside another loop over epochs of this loader.
  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

 private:
  friend class LoaderBase;
  Epochs(LoaderBase& loader, int count) : loader_(&loader), count_(count) {}
  void advance();
  LoaderBase* loader_;
  int count_;
  bool under_way_ = false;
};

}  // namespace lockstep
