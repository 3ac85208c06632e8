#include <lockstep/data_loader.h>

#include <typeinfo>

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

namespace lockstep {
namespace {

const Dataset& required(const std::shared_ptr<const Dataset>& dataset) {
  TORCH_CHECK(dataset != nullptr, "DataLoader: the dataset is null");
  const Dataset& given = *dataset;
  TORCH_CHECK(given.size() > 0, "DataLoader: the dataset has no samples: size() of the ",
              c10::demangle(typeid(given).name()), " is ", given.size(), "; check the files that it was made from");
  return given;
}

void check_rows(const at::Tensor& tensor, const char* name, size_t samples) {
  TORCH_CHECK(
      !tensor.defined() || (tensor.dim() > 0 && tensor.size(0) == static_cast<int64_t>(samples)),
      "DataLoader: the dataset was asked for ", samples, " samples, but the `", name, "` that it returned has ",
      tensor.dim() > 0 ? c10::str("the shape ", tensor.sizes()) : "no dimension",
      "; get() must stack the samples along the first dimension, one for each index, in the order of the indices");
}

detail::BatchType batches_of(const std::shared_ptr<const Dataset>& dataset) {
  return {.make =
              [dataset](at::ArrayRef<int64_t> indices, Draw& draw) {
                auto batch = std::make_shared<Batch>(dataset->draw(indices, draw));
                TORCH_CHECK(batch->data.defined(), "DataLoader: the dataset was asked for ", indices.size(),
                            " samples, the first of which is sample ", indices.front(),
                            ", but the `data` that it returned is an undefined tensor");
                check_rows(batch->data, "data", indices.size());
                check_rows(batch->target, "target", indices.size());
                return batch;
              },
          .for_each_tensor =
              [](void* batch, const std::function<void(at::Tensor&)>& visit) {
                static_cast<Batch*>(batch)->for_each_tensor(visit);
              }};
}

}  // namespace

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, const Shard& shard, DataLoaderOptions options)
    : LoaderBase(batches_of(dataset), required(dataset).size(), shard, std::move(options)),
      dataset_(std::move(dataset)) {}

}  // namespace lockstep
