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

/// The memory of a step that ranks share out, and which elements each of them steps.
///
/// Parameters of one dtype lie side by side in an area, on every rank or once for all of a machine. An area is cut into
/// a slice for each rank that takes part: of this machine, where ranks share memory, else of the group. Parameters
/// begin at multiples of kAligned elements, and a cut within a parameter is whole blocks of a GradientNorm from its
/// beginning. What is remembered of parameters lies in arrays like the area: in memory that all ranks of the machine
/// map, or, where they share none, in memory of which a rank fills its slice only. On a device, where the kernel does
/// not leave out pages that nobody writes, an array is this rank's slice and nothing else.
class Areas {
 public:
  /// Elements: 64 bytes or a multiple in every dtype. LibTorch's operators may round the last elements of a tensor,
  /// fewer than two vectors, otherwise than the rest; a cut between slices must not make others the last ones.
  static constexpr int64_t kAligned = 64;
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    size_t area;
    int64_t offset = 0;          ///< in the area
    at::Tensor here = {};        ///< its view of the area
    int64_t begin = 0, end = 0;  ///< of its elements, in the order of memory: those that this rank steps
  };
  struct Area {
    at::ScalarType dtype;
    int64_t slice = 0;                    ///< elements of each rank's slice
    at::Tensor parameters = {};           ///< [slice of each rank, in their order]
    at::Tensor sampled = {};              ///< on a device: where three elements of each parameter lie in it
    std::vector<std::byte*> others = {};  ///< where it lies on the other ranks; empty where it is shared, or none is
    std::map<std::string, at::Tensor> arrays = {};  ///< of the state, by name
  };

  /// Moves the parameters of the optimizer's groups there. Every rank makes it. `kind` of step: what else must be the
  /// same on all ranks.
  Areas(const ReplicaState& model, const torch::optim::Optimizer& optimizer, const ZeroRedundancyOptions& options,
        const std::string& kind);
  /// Gives the parameters memory of their own again.
  ~Areas();
  Areas(const Areas&) = delete;
  Areas& operator=(const Areas&) = delete;

  const std::vector<Parameter>& parameters() const { return parameters_; }
  const std::vector<Area>& areas() const { return areas_; }
  const Area& area_of(const Parameter& parameter) const { return areas_[parameter.area]; }
  /// Whether the parameters are not on the CPU: then ranks share no memory of them.
  bool on_device() const { return !device_.is_cpu(); }
  bool contains(const at::Tensor& tensor) const { return places_.contains(tensor.unsafeGetTensorImpl()); }
  /// Its number in parameters().
  size_t place_of(const at::Tensor& tensor) const { return places_.at(tensor.unsafeGetTensorImpl()); }
  const Parameter& parameter_of(const at::Tensor& tensor) const { return parameters_[place_of(tensor)]; }

  /// Null where ranks share no memory.
  MachineMemory* memory() const { return memory_; }
  /// How many ranks share out a step, and which of them this one is.
  int ranks() const { return ranks_; }
  int rank() const { return rank_; }

  /// An array like the parameter's area, made if there is none: every rank calls it.
  const at::Tensor& array(const Parameter& parameter, const std::string& name, at::ScalarType dtype);
  /// A parameter's part of an array, in the parameter's shape.
  static at::Tensor view(const at::Tensor& array, const Parameter& parameter);
  /// The elements of a parameter that a rank steps, of those that share out a step, in the order of memory.
  std::pair<int64_t, int64_t> part_of(const Parameter& parameter, int rank) const;
  /// This rank's part of the parameter, flat. `array`: shaped like the area, or this rank's slice of such an array.
  at::Tensor mine(const at::Tensor& array, const Parameter& parameter) const;
  /// This rank's slice of such an array.
  at::Tensor own_slice(const at::Tensor& array, const Area& area) const;
  /// An array of zeros for ranks that share no memory.
  at::Tensor own_zeros(const Area& area, at::ScalarType dtype) const;

  /// Where ranks share no memory: every rank gets the others' slices of what `is_stepped`; else nothing is to be done.
  /// Every rank calls it.
  void gather_parameters(const std::function<bool(const Parameter&)>& is_stepped) const;
  /// Makes the arrays whole, until forget_others(). Every rank calls it where ranks share no memory. Not on a device,
  /// where arrays have no room for the other ranks' slices.
  void complete();
  /// A new array with the slices of all ranks. Every rank calls it.
  at::Tensor whole(const at::Tensor& array, const Area& area) const;
  /// Gives back the memory of the other ranks' slices of the arrays, if they are there.
  void forget_others();

 private:
  void find_parameters(const NamedTensors& trained, const torch::optim::Optimizer& optimizer);
  /// Fails if memory of one is memory of another tensor of the model: moving would part them. Names both.
  void check_none_overlap(const ReplicaState& model) const;
  /// Throws on all ranks if they list other parameters, or in another order. Every rank calls it.
  void check_same_places(const torch::optim::Optimizer& optimizer) const;
  void lay_out(size_t area);
  void move_in(size_t area, bool shared);

  const Group group_;
  const c10::Device device_;
  MachineMemory* const memory_;
  const int ranks_, rank_;
  bool is_complete_ = false;  ///< the arrays hold the other ranks' slices, too
  std::vector<Parameter> parameters_;
  std::vector<Area> areas_;
  std::unordered_map<const c10::TensorImpl*, size_t> places_;  ///< in parameters_
};

}  // namespace lockstep::detail
