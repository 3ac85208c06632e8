#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <lockstep/named_tensors.h>

#include "fully_sharded/machine_groups.h"
#include "fully_sharded/unit_layout.h"

namespace lockstep::fully_sharded {

/// The parameters of a layer, or those that are in no such layer. This rank has one slice of their memory. All of it is
/// there while the unit is open; the parameters of a closed one throw when they are read. A unit that stays gathered is
/// always open, and its slice lies within its memory, which all ranks of the machine share.
///
/// The parameters stay the tensors that they were. They lie in one storage, whose memory comes and goes: what autograd
/// has saved of them for backward, views included, is right again when the unit has been gathered for that.
class Unit {
 public:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    int64_t offset;                   ///< in the unit's memory
    int64_t begin = 0, end = 0;       ///< of its elements, in the order of memory: those in this rank's slice
    at::Tensor part = {};             ///< these, flat: a leaf, whose .grad is theirs
    int64_t version = 0;              ///< of the tensor, when it was right
    uint64_t part_mark = 0;           ///< mark_of() the part then
    uint64_t gradient_mark = 0;       ///< mark_of() the part's gradient as this library left it (part_gradients.h)
    bool has_gradient_mark = false;   ///< there was one
    at::Tensor closed_gradient = {};  ///< made when it is first shown (module_gradients.h)
    bool shows_gradient = false;      ///< as the tensor's .grad
    bool stepped = false;             ///< by the optimizer that there is, or was last
  };

  /// Takes rank 0's values, and the parameters' own memory goes. Every rank makes it.
  Unit(std::string name, const NamedTensors& parameters, const MachineGroups& groups, bool stays_gathered);
  ~Unit();
  Unit(Unit&&) = default;  ///< the other has no parameters then
  Unit& operator=(Unit&&) = delete;
  /// Of one that stays gathered: reading its parameters throws, as on several machines, until rename().
  void withhold();
  /// For messages: its name and its parameters', in the module.
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
  /// This rank's slice of the parameters.
  const at::Tensor& slice() const { return slice_; }
  /// The parameters' memory, [elements()]: all of it, if it stays gathered, otherwise with this rank's slice
  /// (checkpoint/sliced_memory.h).
  const at::Tensor& memory() const { return stays_gathered() ? whole_ : in_slices_; }
  /// This rank's rail's piece of [elements()] of memory.
  at::Tensor piece_of(const at::Tensor& memory) const;
  /// A parameter's place in memory of [elements()], in its shape.
  static at::Tensor view(const at::Tensor& memory, const Parameter& parameter);

  /// Its parameters are in `memory`, [elements()], until close().
  void open(const at::Tensor& memory);
  void close();

  /// Of one that stays gathered, after the ranks have changed their slices: brings those of other machines, and waits
  /// for the ranks of this one. Every rank calls it.
  void gather_changes();
  /// The parameters are as they should be.
  void remember();
  /// How often its parameters have changed.
  int64_t changes() const;
  /// The name of one that something else has changed since, or its part, or given other memory; empty if there is none.
  /// What goes around autograd's versions, as data() does, is seen of parts alone, by a sample.
  std::string changed() const;
  /// Sets this rank's slice, and what this rank's rail holds of memory that stays gathered, from whole parameters.
  void set_from(const at::Tensor& memory);

 private:
  void adopt_initial_values();
  void move_parameters_to(const c10::Storage& storage);
  void close_with(const std::string& why);

  std::string name_;
  const MachineGroups& groups_;
  at::ScalarType dtype_;
  UnitLayout layout_;
  std::vector<Parameter> parameters_;
  at::Tensor slice_;
  at::Tensor whole_;      ///< of one that stays gathered
  at::Tensor in_slices_;  ///< otherwise
  c10::Storage storage_;  ///< of the parameters, otherwise
};

}  // namespace lockstep::fully_sharded
