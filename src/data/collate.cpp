#include <lockstep/example_loader.h>

#include <ATen/ATen.h>

#include "data/random.h"

namespace lockstep {
namespace detail {

at::Tensor stack_examples(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(!tensors.empty(), "default_collate: the batch has no examples; give it at least one");
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK(tensors[i].defined(), "default_collate: example ", i, " of a batch has an undefined tensor");
    TORCH_CHECK(tensors[i].sizes() == tensors[0].sizes(), "default_collate: example ", i,
                " of a batch has a tensor of ", tensors[i].sizes(), ", and the first one of ", tensors[0].sizes(),
                "; give the loader a function that makes a batch of such tensors, for example by padding");
  }
  return at::stack(tensors);
}

at::Tensor tensor_of(const std::vector<int64_t>& numbers) { return at::tensor(numbers, at::kLong); }
at::Tensor tensor_of(const std::vector<double>& numbers) { return at::tensor(numbers, at::kDouble); }
at::Tensor tensor_of(const std::vector<float>& numbers) { return at::tensor(numbers, at::kFloat); }
at::Tensor tensor_of(const std::vector<bool>& values) {
  return at::tensor(std::vector<int64_t>(values.begin(), values.end()), at::kLong).to(at::kBool);
}

void check_example(const at::Tensor& tensor, int64_t index) {
  TORCH_CHECK(tensor.defined(), "ExampleLoader: example ", index,
              " of the dataset has an undefined tensor; get() must give every tensor a value");
}

uint64_t example_seed(const Draw& draw, int64_t index) {
  return sample_seed(draw.seed, draw.epoch, index, draw.transforms);
}

}  // namespace detail
}  // namespace lockstep
