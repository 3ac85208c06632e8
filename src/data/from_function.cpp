#include <lockstep/from_function.h>

#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/example_loader.h>

namespace lockstep::datasets {

namespace {
FromFunction::RandomFunction without_seeds(FromFunction::Function make) {
  if (make == nullptr) return nullptr;
  return [make = std::move(make)](at::ArrayRef<int64_t> indices, at::ArrayRef<uint64_t>) { return make(indices); };
}

void check_rows(const at::Tensor& tensor, const char* what, at::ArrayRef<int64_t> indices) {
  const auto wanted = static_cast<int64_t>(indices.size());
  TORCH_CHECK(tensor.dim() > 0 && tensor.size(0) == wanted, "FromFunction: the function was asked for ", wanted,
              " samples from index ", indices[0], " on and returned a `", what, "` of the shape ", tensor.sizes(),
              "; its first dimension must be the number of samples");
}
}  // namespace

FromFunction::FromFunction(int64_t size, Function make) : FromFunction(size, without_seeds(std::move(make))) {}

FromFunction::FromFunction(int64_t size, RandomFunction make) : size_(size), make_(std::move(make)) {
  TORCH_CHECK(size >= 0, "FromFunction: ", size, " samples");
  TORCH_CHECK(make_ != nullptr, "FromFunction: the function is null");
}

Batch FromFunction::get(at::ArrayRef<int64_t> indices) const {
  Draw first;
  return draw(indices, first);
}

Batch FromFunction::draw(at::ArrayRef<int64_t> indices, Draw& draw) const {
  std::vector<uint64_t> seeds;
  seeds.reserve(indices.size());
  for (const int64_t index : indices) seeds.push_back(detail::example_seed(draw, index));
  Batch batch = make_(indices, seeds);
  if (indices.empty()) return batch;
  TORCH_CHECK(batch.data.defined(), "FromFunction: the function returned a `data` that is an undefined tensor");
  check_rows(batch.data, "data", indices);
  if (batch.target.defined()) check_rows(batch.target, "target", indices);
  return batch;
}

}  // namespace lockstep::datasets
