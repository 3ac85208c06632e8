#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/api/include/torch/data/datasets/base.h>
#include <torch/csrc/api/include/torch/types.h>

#include <lockstep/dataset.h>

namespace lockstep::datasets {

/// Adapts a dataset of torch::data, with or without `.map(...)`, to a DataLoader, which shares it out among the ranks:
///
///     auto images = torch::data::datasets::MNIST(folder).map(torch::data::transforms::Normalize<>(0.1307, 0.3081));
///     lockstep::DataLoader train(lockstep::datasets::TorchData(std::move(images)), context,
///                                {.batch_size = 64, .shuffle = true});
///
/// (`TorchData(images)` would declare a parameter of that name: write std::move, or braces.)
///
/// A list of examples becomes a batch of their tensors, stacked; a batch made by torch::data::transforms::Stack is used
/// as it is. Examples without a target have an undefined one. DataLoader provides the order, the batches and the
/// workers: torch's samplers and loaders are not needed.
///
/// As under torch's own loader, every worker uses a copy of the dataset, and copies must give the same samples. Draws
/// of torch::data's random transforms depend on the worker, so they differ from run to run; those of transforms.h do
/// not.
///
/// TORCH_CHECK fails for a dataset that does not know its size. Datasets that choose the samples themselves (streams,
/// chunks, shared ones) do not compile: they cannot be shared out among ranks.
template <typename D>
class TorchData : public Dataset {
  static_assert(std::same_as<typename D::BatchRequestType, at::ArrayRef<size_t>> && !D::is_stateful,
                "TorchData needs a dataset that returns samples by their indices: a stream or a chunk dataset chooses "
                "them itself");
  static_assert(std::copy_constructible<D>, "TorchData needs a dataset that can be copied, one for each worker");

 public:
  explicit TorchData(D dataset) : source_(std::make_shared<Source>(std::move(dataset))) {
    const auto size = source_->original.size();
    TORCH_CHECK(size.has_value(), "TorchData: the dataset does not know its size");
    size_ = static_cast<int64_t>(*size);
  }

  int64_t size() const override { return size_; }
  Batch get(at::ArrayRef<int64_t> indices) const override {
    const std::vector<size_t> wanted(indices.begin(), indices.end());
    std::unique_ptr<D> dataset = source_->take();
    auto made = dataset->get_batch(wanted);
    source_->put_back(std::move(dataset));
    return batch_of(made, indices);
  }

 private:
  /// The dataset, and the copies that no worker is using.
  struct Source {
    explicit Source(D dataset) : original(std::move(dataset)) {}
    std::unique_ptr<D> take() {
      const std::scoped_lock lock(mutex);
      if (idle.empty()) return std::make_unique<D>(original);
      std::unique_ptr<D> dataset = std::move(idle.back());
      idle.pop_back();
      return dataset;
    }
    void put_back(std::unique_ptr<D> dataset) {
      const std::scoped_lock lock(mutex);
      idle.push_back(std::move(dataset));
    }

    D original;
    std::mutex mutex;
    std::vector<std::unique_ptr<D>> idle;
  };

  /// A batch, or a list of examples, of these indices.
  template <typename Made>
  static Batch batch_of(const Made& made, at::ArrayRef<int64_t> indices) {
    Batch batch;
    if constexpr (requires { made.data; }) {
      static_assert(std::same_as<std::remove_cvref_t<decltype(made.data)>, at::Tensor>, "TorchData: data is a tensor");
      batch.data = made.data;
      if constexpr (requires { made.target; }) batch.target = made.target;
    } else if constexpr (std::same_as<Made, at::Tensor>) {
      batch.data = made;
    } else {
      TORCH_CHECK(made.size() == indices.size(), "TorchData: the dataset was asked for ", indices.size(),
                  " samples and returned ", made.size(), "; get_batch() returns one for each index");
      std::vector<at::Tensor> data, targets;
      for (size_t i = 0; i < indices.size(); ++i) {
        const Batch one = batch_of(made[i], indices.slice(i, 1));
        TORCH_CHECK(one.data.defined(), "TorchData: the `data` of sample ", indices[i], " is an undefined tensor");
        data.push_back(one.data);
        if (one.target.defined()) targets.push_back(one.target);
        TORCH_CHECK(targets.empty() || targets.size() == data.size(), "TorchData: of the samples ", indices[0], " and ",
                    indices[i],
                    ", one has a `target` and the other one an undefined tensor; give all samples a target, or none");
      }
      batch.data = stacked(data, "data", indices);
      if (!targets.empty()) batch.target = stacked(targets, "target", indices);
    }
    return batch;
  }

  static at::Tensor stacked(const std::vector<at::Tensor>& tensors, const char* what, at::ArrayRef<int64_t> indices) {
    for (size_t i = 0; i < tensors.size(); ++i)
      TORCH_CHECK(tensors[i].sizes() == tensors[0].sizes(), "TorchData: the `", what, "` of sample ", indices[0],
                  " has the shape ", tensors[0].sizes(), ", and that of sample ", indices[i], " has ",
                  tensors[i].sizes(),
                  ", so they cannot form a batch; give all samples the same shape, or use an ExampleLoader with a "
                  "function that pads");
    return torch::stack(tensors);
  }

  std::shared_ptr<Source> source_;
  int64_t size_ = 0;
};

}  // namespace lockstep::datasets
