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
/// The type of a loader's batches, as functions.
struct BatchType {
  /// Makes a batch; called on several workers at once.
  std::function<std::shared_ptr<void>(at::ArrayRef<int64_t> indices, Draw& draw)> make;
  /// Visits all tensors of a batch. Null: they are not known.
  std::function<void(void* batch, const std::function<void(at::Tensor&)>& visit)> for_each_tensor;
};

class EpochPlan;        // which samples a rank takes, in which batches
struct LoaderPosition;  // how far a pass has come
struct LoaderPass;      // a pass over batches of any type; its destructor stops its workers
void advance(LoaderPass& pass);
void* current(const LoaderPass& pass);
bool has_ended(const LoaderPass& pass);
int64_t samples_of(const LoaderPass& pass);
}  // namespace detail

/// The common part of DataLoader and ExampleLoader.
///
/// Unless `exactly_once` is set, every rank gets the same number of batches of the same sizes, so that collectives in
/// each step match. The order of batches does not depend on timing or on the number of workers.
///
/// Loaders do not communicate. The next reduction of a DistributedDataParallel throws on all ranks if their loaders
/// have begun different passes; a loader with Shard(0, 1) is not compared. A loader is used by one thread. Several
/// passes may be open at once; each has its own workers, which end with the pass. Outside `epochs`, every pass is a new
/// epoch with a new order; inside, all passes of one epoch have the same order.
class LoaderBase {
 public:
  class Epochs;

  /// For a range-for over epochs: the numbers `first`, ..., `count` - 1, where `first` is 0 or the argument of
  /// `set_epoch` (when training resumes) and `count` is the length of the whole training. Each number selects the
  /// shuffle of its epoch. The loader must outlive the loop and must not be moved. Every rank must use the same
  /// numbers.
  Epochs epochs(int count);

  /// Continues as after `epoch` epochs: the next pass belongs to this epoch, and `epochs` starts with it. Not needed in
  /// a loop over `epochs`, where a different number is an error.
  void set_epoch(int epoch);

  /// The position of the newest pass, for a checkpoint: the epoch, the number of its samples done on all ranks together
  /// (including the current batch), and the facts that determine the order, including a sampler's state. It is equal on
  /// every rank, except in the last batch of a pass with `exactly_once`: use rank 0's there. With virtual ranks
  /// TORCH_CHECK fails within a step, when only some of this rank's virtual ranks have had their batch.
  c10::IValue state_dict() const;

  /// Continues from a saved position, on any number of ranks and with any batch size: the next pass has the rest of the
  /// epoch, in which each remaining sample comes once (with padding, as at the end of every epoch). Not allowed inside
  /// `epochs`. Throws Error if dataset, seed or shuffle differ. The next pass throws Error if a sampler then gives a
  /// different order.
  void load_state_dict(const c10::IValue& state);

  /// The number of batches, rounded up, that the next pass skips on this rank because a checkpoint already has them;
  /// counted with the present batch size and number of ranks.
  int64_t first_step() const;
  /// Batches in the next pass, on this rank.
  int64_t steps_left() const;

  /// Batches per step on this rank (several with virtual ranks), and this rank's share of all samples.
  int64_t batches_per_step() const;
  double share() const;
  /// How the newest pass spent its time; zeros before the first pass.
  LoaderStats stats() const;
  /// The current epoch inside `epochs`, otherwise the epoch of the next pass. Counts from 0.
  int epoch() const { return epoch_; }
  /// The `count` of the current loop over `epochs`, or 0.
  int epoch_count() const { return epoch_count_; }
  /// Batches in an epoch, on this rank.
  int64_t size() const { return size_; }
  /// Samples in an epoch, on this rank.
  int64_t samples() const { return samples_; }
  int64_t dataset_size() const;
  int64_t order_hash() const;  ///< of a sampler's order for the next pass; 0 without one
  const DataLoaderOptions& options() const;
  int rank() const;
  int world_size() const;
  bool serves_several_virtual_ranks() const;
  /// The current batch of the newest pass.
  struct BatchShare {
    int64_t here = 0;          ///< samples on this rank
    int64_t in_all = 0;        ///< on all ranks together, without repeated samples
    bool on_all_ranks = true;  ///< false: with exactly_once some ranks have fewer batches in this pass
  };
  BatchShare batch_share() const;

 protected:
  /// Throws c10::Error for invalid options.
  LoaderBase(detail::BatchType type, int64_t dataset_size, const Shard& shard, DataLoaderOptions options);
  /// Starts a pass over this rank's share. An exception that the dataset throws for a batch is rethrown here or by the
  /// advance() to that batch. The loader stays usable.
  std::shared_ptr<detail::LoaderPass> begin_pass();

 private:
  detail::BatchType type_;
  std::shared_ptr<detail::EpochPlan> plan_;
  int64_t samples_ = 0;
  int64_t size_ = 0;
  int first_epoch_ = 0;
  int epoch_ = 0;
  int epoch_count_ = 0;  // above 0 during a loop over epochs()
  int64_t start_ = 0;    // places of the next pass that were taken before a checkpoint

  std::shared_ptr<detail::LoaderPosition> position_;  // of the newest pass; null before the first
};

/// Owns a pass: its destructor stops the pass's workers.
template <typename B>
class BatchIterator {
 public:
  using value_type = B;
  using difference_type = std::ptrdiff_t;

  BatchIterator(BatchIterator&&) noexcept = default;
  BatchIterator& operator=(BatchIterator&&) noexcept = default;

  /// The loop may keep or change the batch, or move its tensors away.
  B& operator*() const { return *static_cast<B*>(detail::current(*pass_)); }
  BatchIterator& operator++() {
    detail::advance(*pass_);
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t) const { return detail::has_ended(*pass_); }
  /// Number of samples in the batch.
  int64_t samples() const { return detail::samples_of(*pass_); }

 private:
  friend class DataLoader;
  template <typename>
  friend class ExampleLoader;
  explicit BatchIterator(std::shared_ptr<detail::LoaderPass> pass) : pass_(std::move(pass)) { ++*this; }
  std::shared_ptr<detail::LoaderPass> pass_;
};

/// A loop over epochs. Ends after its last epoch, or when destroyed.
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
