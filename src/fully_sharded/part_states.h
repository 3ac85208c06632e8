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

/// The place of a parameter's part in its unit's memory.
struct PartPlace {
  std::string name;                     ///< of the parameter
  std::vector<int64_t> sizes, strides;  ///< of the parameter
  size_t unit = 0;
  int64_t slice_elements = 0;  ///< of each rank's slice of that unit
  int64_t offset = 0;          ///< of the parameter, in the unit's memory
  int64_t begin = 0, end = 0;  ///< elements of the parameter, in memory order, in the part
};

/// The optimizer state of parts, masters included, in two forms. Steps use flat tensors, as large as the parts. Saving
/// uses tensors with the parameters' shapes, in memory of which this rank has its slice; after a save the flat tensors
/// lie in that memory, and with a folder, whose files hold it, from the first step on. Loading gives complete tensors
/// with the parameters' shapes.
class PartStates {
 public:
  using Places = std::unordered_map<const c10::TensorImpl*, PartPlace>;  ///< by part
  PartStates(Places places, std::shared_ptr<const MachineGroups> groups, const Formula& formula,
             const ZeroRedundancyOptions& options)
      : places_(std::move(places)),
        groups_(std::move(groups)),
        formula_(formula),
        folder_(options.state_folder),
        masters_(options.master_weights) {}

  bool has(const at::Tensor& part) const { return places_.contains(part.unsafeGetTensorImpl()); }
  const std::string& name_of(const at::Tensor& part) const { return place_of(part).name; }
  at::IntArrayRef sizes_of(const at::Tensor& part) const { return place_of(part).sizes; }
  /// Makes room in the folder for the state of all parts that a step changes. Throws StorageError.
  void reserve(const torch::optim::Optimizer& optimizer);
  /// Zeros, in the form for steps.
  at::Tensor zeros(const at::Tensor& part, int array, at::ScalarType dtype);
  /// Those of a loaded array of that parameter that become the form for steps.
  std::pair<int64_t, int64_t> elements_to_load(const at::Tensor& part, const at::Tensor& array) const;
  /// Changes to the form for steps.
  void flatten(torch::optim::Optimizer& optimizer);
  /// Changes to the form for saving. Never holds more than 64 MiB in both forms.
  void show(torch::optim::Optimizer& optimizer);

 private:
  const PartPlace& place_of(const at::Tensor& part) const { return places_.at(part.unsafeGetTensorImpl()); }
  template <typename Body>
  void for_each(torch::optim::Optimizer& optimizer, const Body& body) const;
  at::Tensor flat(const at::Tensor& array, const at::Tensor& part) const;
  /// The place of a part's array in memory().
  at::Tensor own_place(const at::Tensor& part, int array, at::ScalarType dtype);
  /// Memory for the `array`-th arrays (kMasterArray: the masters) of the parameters in this place's unit.
  const at::Tensor& memory(const PartPlace& place, int array, at::ScalarType dtype);

  const Places places_;
  const std::shared_ptr<const MachineGroups> groups_;
  const Formula& formula_;
  const std::string folder_;
  const bool masters_;
  std::map<std::pair<size_t, int>, at::Tensor> memory_;
};

}  // namespace lockstep::fully_sharded
