#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <lockstep/named_tensors.h>
#include <lockstep/sharded_unit.h>

#include "fully_sharded/machine_groups.h"
#include "fully_sharded/unit_layout.h"

namespace lockstep::fully_sharded {

/// The parameters of a layer, or those in no such layer. This rank has one slice of their memory. While the unit is
/// open, all of it is present; reading the parameters of a closed unit throws. A unit that stays gathered is always
/// open, and its slice lies within its memory, which all ranks of the machine share.
///
/// The parameters stay the same tensors. They lie in one storage, whose memory comes and goes: tensors that autograd
/// has saved for backward, views included, are valid again when the unit has been gathered for it.
class Unit {
 public:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    int64_t offset;              ///< in the unit's memory
    int64_t begin = 0, end = 0;  ///< its elements, in memory order, in this rank's slice
    at::Tensor part = {};        ///< these elements, flat: a leaf, whose .grad is their gradient
    int64_t version = 0;         ///< of the tensor, when last set
    uint64_t part_mark = 0;      ///< mark_of() the part, when last set
    uint64_t gradient_mark = 0;  ///< mark_of() the part's gradient as this library left it (part_gradients.h)
    bool has_gradient_mark = false;
    at::Tensor closed_gradient = {};  ///< made when first shown (module_gradients.h)
    bool shows_gradient = false;      ///< as the tensor's .grad
    bool stepped = false;             ///< by the present optimizer, or the last one
  };

  /// Sets the parameters to rank 0's values and frees their own memory.
  /// REQUIRES: every rank makes it.
  Unit(std::string name, const NamedTensors& parameters, const MachineGroups& groups, bool stays_gathered);
  ~Unit();
  Unit(Unit&&) = default;  ///< the other has no parameters then
  Unit& operator=(Unit&&) = delete;
  /// For a unit that stays gathered: makes reading its parameters throw, as on several machines, until rename().
  void withhold();
  /// Sets the names of the unit and its parameters in messages.
  void rename(const std::string& name, const NamedTensors& parameters);

  const std::string& name() const { return name_; }
  std::vector<Parameter>& parameters() { return parameters_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  at::ScalarType dtype() const { return dtype_; }
  bool stays_gathered() const { return whole_.defined(); }
  int64_t slice_elements() const { return layout_.slice; }
  int64_t slice_bytes() const { return layout_.slice * static_cast<int64_t>(c10::elementSize(dtype_)); }
  int64_t elements() const { return layout_.slice * groups_.all().world_size(); }
  int64_t bytes() const { return slice_bytes() * groups_.all().world_size(); }
  const at::Tensor& slice() const { return slice_; }
  /// The parameters' memory, [elements()]: whole if the unit stays gathered, otherwise with this rank's slice
  /// (checkpoint/sliced_memory.h).
  const at::Tensor& memory() const { return stays_gathered() ? whole_ : in_slices_; }
  /// The piece of [elements()] memory that belongs to this rank's rail.
  at::Tensor piece_of(const at::Tensor& memory) const;
  /// A parameter's view of [elements()] memory, in its shape.
  static at::Tensor view(const at::Tensor& memory, const Parameter& parameter);

  /// Puts the parameters into `memory`, [elements()], until close().
  void open(const at::Tensor& memory);
  void close();

  /// For a unit that stays gathered, after the ranks have changed their slices: fetches the other machines' slices, and
  /// waits for the ranks of this one.
  /// REQUIRES: every rank calls it.
  void gather_changes();
  /// Records that the parameters are as they should be.
  void remember();
  int64_t changes() const;
  /// The name of a parameter that other code has changed since, or whose part it has changed, or that it gave other
  /// memory; empty if none. Writes that bypass autograd's versions, as through data(), are detected only in parts, by a
  /// sample.
  std::string changed() const;
  /// Sets this rank's slice, and this rank's rail's piece of memory that stays gathered, from whole parameters.
  void set_from(const at::Tensor& memory);

 private:
  void move_parameters_to(const c10::Storage& storage);
  void close_with(const std::string& why);

  std::string name_;
  const MachineGroups& groups_;
  at::ScalarType dtype_;
  UnitLayout layout_;
  std::vector<Parameter> parameters_;
  at::Tensor slice_;
  at::Tensor whole_;      ///< if the unit stays gathered
  at::Tensor in_slices_;  ///< otherwise
  c10::Storage storage_;  ///< of the parameters, otherwise
};

}  // namespace lockstep::fully_sharded

namespace lockstep::detail {

/// State that a ShardedInitialization leaves in a layer until a FullyShardedDataParallel takes it.
struct EarlyUnit {
  std::shared_ptr<const fully_sharded::MachineGroups> groups;
  fully_sharded::Unit unit;
};

}  // namespace lockstep::detail
