#include "collectives/operand_checks.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include "collectives/core_types.h"

namespace lockstep {

void refuse_unless_dense(const char* operation, const char* role, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), operation, ": the ", role, " is an undefined tensor; allocate it first");
  TORCH_CHECK(tensor.layout() == at::kStrided, operation, ": the ", role,
              " is sparse; make it dense first, e.g. with to_dense()");
}

void refuse_unless_defined(const char* operation, const at::Tensor& tensor, ReduceOp op) {
  const bool numbers = tensor.is_floating_point() || tensor.is_complex();
  TORCH_CHECK(op != ReduceOp::kMean || numbers, operation, ": the mean of ", dtype_name(tensor.scalar_type()),
              " tensors is not defined; use kSum, or a floating point tensor");
  TORCH_CHECK((op != ReduceOp::kAnd && op != ReduceOp::kOr) || !numbers, operation,
              ": kAnd and kOr work on integer and bool tensors, not on ", dtype_name(tensor.scalar_type()));
}

void check_rows(const char* operation, const char* role, const at::Tensor& rows, const at::Tensor& row,
                int world_size) {
  TORCH_CHECK(rows.numel() == row.numel() * world_size && rows.scalar_type() == row.scalar_type(), operation, ": the ",
              role, " must be ", dtype_name(row.scalar_type()), " with ", row.numel(), " x ", world_size,
              " elements, one row for each rank; it is ", dtype_name(rows.scalar_type()), " with ", rows.numel());
}

void refuse_unless_written(const char* operation, const at::Tensor& tensor) {
  TORCH_CHECK(!tensor._is_zerotensor(), operation,
              ": the tensor is autograd's zero, which has no memory to be written to; clone() it first");
  TORCH_CHECK(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, operation,
              ": several elements of a tensor that is written share memory, as after expand(); clone() it first");
}

namespace {

struct Memory {
  const char* begin = nullptr;
  const char* end = nullptr;

  /// Nothing if a copy of the tensor is sent.
  static Memory of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.is_contiguous() || tensor.numel() == 0 ||
        !tensor.has_storage())
      return {};
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    return begin == nullptr ? Memory() : Memory{begin, begin + tensor.nbytes()};
  }
  bool overlaps(const Memory& other) const { return begin < other.end && other.begin < end; }
  bool is(const Memory& other) const { return begin == other.begin && end == other.end; }
};

constexpr const char* kWayOut =
    ", so ranks would read what is being written. Use another tensor, or clone() one of them";

}  // namespace

void check_apart(const char* operation, const at::Tensor& rows, const at::Tensor& row, int own) {
  const Memory first = Memory::of(rows), second = Memory::of(row);
  if (rows.device() != row.device() || !first.overlaps(second)) return;
  if (own >= 0 && second.begin == first.begin + static_cast<size_t>(own) * row.nbytes()) return;
  TORCH_CHECK(false, operation, ": the input and the output share memory",
              own >= 0 ? ", and not as this rank's own row" : "", kWayOut);
}

void check_lists_apart(const char* operation, const std::vector<at::Tensor>& outputs,
                       const std::vector<at::Tensor>& inputs, size_t own_output, size_t own_input) {
  std::vector<Memory> written, read;
  for (const at::Tensor& output : outputs) written.push_back(Memory::of(output));
  for (const at::Tensor& input : inputs) read.push_back(Memory::of(input));
  for (size_t i = 0; i < written.size(); ++i) {
    for (size_t j = 0; j < i; ++j)
      TORCH_CHECK(!written[i].overlaps(written[j]), operation, ": outputs ", j, " and ", i,
                  " share memory and would overwrite each other. Give every output a tensor of its own");
    for (size_t j = 0; j < read.size(); ++j)
      TORCH_CHECK(!written[i].overlaps(read[j]) || (i == own_output && j == own_input && written[i].is(read[j])),
                  operation, ": input ", j, " and output ", i, " share memory", kWayOut);
  }
}

int64_t rows_of(const char* role, const std::vector<int64_t>& splits) {
  int64_t rows = 0;
  for (const int64_t split : splits)
    TORCH_CHECK(split >= 0 && !__builtin_add_overflow(rows, split, &rows), "all_to_all: the splits of the ", role, ", ",
                at::IntArrayRef(splits), ", are not all numbers of rows; give 0 or more for each rank");
  return rows;
}

void check_message(const char* operation, int peer, int tag, const Group& group) {
  TORCH_CHECK(peer != group.rank() || group.world_size() == 1, operation, ": rank ", peer,
              " is this rank itself; copy the tensor instead");
  TORCH_CHECK(tag >= 0, operation, ": the tag is ", tag, "; a tag is at least 0");
}

}  // namespace lockstep
