#include <lockstep/data_loader.h>

#include <c10/util/Exception.h>

namespace lockstep {
namespace {

const Dataset& required(const std::shared_ptr<const Dataset>& dataset) {
  TORCH_CHECK(dataset != nullptr, "DataLoader: no dataset");
  return *dataset;
}

detail::BatchType batches_of(const std::shared_ptr<const Dataset>& dataset) {
  return {.make = [dataset](at::ArrayRef<int64_t> indices,
                            Draw& draw) { return std::make_shared<Batch>(dataset->draw(indices, draw)); },
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
