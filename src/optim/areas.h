#pragma once

#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include <lockstep/zero_redundancy_optimizer.h>

#include "collectives/machine_memory.h"
#include "data_parallel/replica_state.h"

namespace lockstep::detail {

/// The memory of a step that ranks share, and the elements that each rank steps.
///
/// Parameters of one dtype lie side by side in an area, on every rank or once per machine. An area is cut into a slice
/// for each participating rank: each rank of this machine if ranks share memory, else each rank of the group.
/// Parameters begin at multiples of kAligned elements, and a cut within a parameter is a multiple of a GradientNorm
/// block from its beginning. Optimizer state lies in arrays shaped like the area: in memory that all ranks of the
/// machine map or, if they share none, in memory of which a rank fills only its slice. On a device, where untouched
/// pages still occupy memory, an array is only this rank's slice.
class Areas {
 public:
  /// In elements: a multiple of 64 bytes in every dtype. LibTorch's operators may round the last elements of a tensor,
  /// fewer than two vectors, differently from the rest, so cuts between slices must not change which elements are last.
  static constexpr int64_t kAligned = 64;
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    size_t area;
    int64_t offset = 0;          ///< in the area
    at::Tensor here = {};        ///< its view of the area
    int64_t begin = 0, end = 0;  ///< the elements that this rank steps, in memory order
  };
  struct Area {
    at::ScalarType dtype;
    int64_t slice = 0;                    ///< elements of each rank's slice
    at::Tensor parameters = {};           ///< [slice of each rank, in rank order]
    at::Tensor sampled = {};              ///< on a device: the indices of three elements of each parameter
    std::vector<std::byte*> others = {};  ///< its addresses on the other ranks; empty if it is shared, or no memory is
    std::map<std::string, at::Tensor> arrays = {};  ///< of the state, by name
  };

  /// Moves the parameters of the optimizer's groups into areas. `kind` is the kind of step, which must be equal on all
  /// ranks.
  /// REQUIRES: every rank makes one.
  Areas(const ReplicaState& model, const torch::optim::Optimizer& optimizer, const ZeroRedundancyOptions& options,
        const std::string& kind);
  /// Calls give_back().
  ~Areas();
  Areas(const Areas&) = delete;
  Areas& operator=(const Areas&) = delete;

  const std::vector<Parameter>& parameters() const { return parameters_; }
  const std::vector<Area>& areas() const { return areas_; }
  const Area& area_of(const Parameter& parameter) const { return areas_[parameter.area]; }
  /// Whether the parameters are on a device. Ranks then share none of their memory.
  bool on_device() const { return !device_.is_cpu(); }
  bool contains(const at::Tensor& tensor) const { return places_.contains(tensor.unsafeGetTensorImpl()); }
  size_t place_of(const at::Tensor& tensor) const { return places_.at(tensor.unsafeGetTensorImpl()); }
  const Parameter& parameter_of(const at::Tensor& tensor) const { return parameters_[place_of(tensor)]; }

  /// Null if ranks share no memory.
  MachineMemory* memory() const { return memory_; }
  /// The number of ranks that share a step, and this rank's number among them.
  int ranks() const { return ranks_; }
  int rank() const { return rank_; }

  /// An array like the parameter's area, made if missing.
  /// REQUIRES: every rank calls it.
  const at::Tensor& array(const Parameter& parameter, const std::string& name, at::ScalarType dtype);
  /// A parameter's part of an array, in the parameter's shape.
  static at::Tensor view(const at::Tensor& array, const Parameter& parameter);
  /// The elements of a parameter, in memory order, that are stepped by `rank`, numbered among the ranks that share a
  /// step.
  std::pair<int64_t, int64_t> part_of(const Parameter& parameter, int rank) const;
  /// This rank's part of the parameter, flat. `array` is shaped like the area, or is this rank's slice of such an
  /// array.
  at::Tensor mine(const at::Tensor& array, const Parameter& parameter) const;
  /// This rank's slice of such an array.
  at::Tensor own_slice(const at::Tensor& array, const Area& area) const;
  /// An array of zeros for ranks that share no memory.
  at::Tensor own_zeros(const Area& area, at::ScalarType dtype) const;

  /// If ranks share no memory, gives every rank the others' slices of parameters for which `is_stepped`; otherwise does
  /// nothing.
  /// REQUIRES: every rank calls it.
  void gather_parameters(const std::function<bool(const Parameter&)>& is_stepped) const;
  /// Makes the arrays whole until forget_others(). Not for a device, where arrays have no room for other ranks' slices.
  /// REQUIRES: every rank calls it if ranks share no memory.
  void complete();
  /// A new array with the slices of all ranks.
  /// REQUIRES: every rank calls it.
  at::Tensor whole(const at::Tensor& array, const Area& area) const;
  /// Frees the memory of other ranks' slices of the arrays, if present.
  void forget_others();

 private:
  void find_parameters(const NamedTensors& trained, const torch::optim::Optimizer& optimizer);
  void lay_out(size_t area);
  void move_in(size_t area, bool shared);

  const Group group_;
  const c10::Device device_;
  MachineMemory* const memory_;
  const int ranks_, rank_;
  bool is_complete_ = false;  ///< the arrays also hold the other ranks' slices
  std::vector<Parameter> parameters_;
  std::vector<Area> areas_;
  std::unordered_map<const c10::TensorImpl*, size_t> places_;  ///< in parameters_
};

/// Gives the parameters their own memory again.
void give_back(const Areas& areas);

}  // namespace lockstep::detail
