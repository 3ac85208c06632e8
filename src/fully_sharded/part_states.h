#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "fully_sharded/machine_groups.h"
#include "optim/formula.h"

namespace lockstep::fully_sharded {

/// Where a parameter's part lies in its unit's memory.
struct PartPlace {
  std::string name;                     ///< of the parameter
  std::vector<int64_t> sizes, strides;  ///< of the parameter
  size_t unit = 0;
  int64_t slice_elements = 0;  ///< of each rank's slice of that unit
  int64_t offset = 0;          ///< of the parameter, in the unit's memory
  int64_t begin = 0, end = 0;  ///< of its elements, in the order of memory: those of the part
};

/// What an optimizer remembers of parts, in two forms. Steps take flat tensors, as large as the parts. Saving takes
/// tensors of the parameters' shapes in memory of which this rank has its slice; once there, the flat ones lie in it.
/// Loading gives tensors of the parameters' shapes that are all there.
class PartStates {
 public:
  using Places = std::unordered_map<const c10::TensorImpl*, PartPlace>;  ///< by part
  PartStates(Places places, std::shared_ptr<const MachineGroups> groups, const Formula& formula)
      : places_(std::move(places)), groups_(std::move(groups)), formula_(formula) {}

  bool has(const at::Tensor& part) const { return places_.contains(part.unsafeGetTensorImpl()); }
  const std::string& name_of(const at::Tensor& part) const { return place_of(part).name; }
  at::IntArrayRef sizes_of(const at::Tensor& part) const { return place_of(part).sizes; }
  /// Those of a loaded array of that parameter that become the form for steps.
  std::pair<int64_t, int64_t> elements_to_load(const at::Tensor& part, const at::Tensor& array) const;
  /// The form for steps.
  void flatten(torch::optim::Optimizer& optimizer);
  /// The form for saving. Never holds more than 64 MiB of both forms at once.
  void show(torch::optim::Optimizer& optimizer);

 private:
  const PartPlace& place_of(const at::Tensor& part) const { return places_.at(part.unsafeGetTensorImpl()); }
  template <typename Body>
  void for_each(torch::optim::Optimizer& optimizer, const Body& body) const;
  at::Tensor flat(const at::Tensor& array, const at::Tensor& part) const;
  /// Memory for the `array`-th arrays of the parameters in the unit of this one.
  const at::Tensor& memory(const PartPlace& place, int array, at::ScalarType dtype);

  const Places places_;
  const std::shared_ptr<const MachineGroups> groups_;
  const Formula& formula_;
  std::map<std::pair<size_t, int>, at::Tensor> memory_;
};

}  // namespace lockstep::fully_sharded
