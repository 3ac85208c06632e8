#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <lockstep/group.h>

// Every operation of Group in a form that a test can start, wait for and check against its definition.

namespace lockstep::testing {

inline const at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf,         at::kBFloat16,
                                         at::kChar,  at::kByte,   at::kShort,        at::kInt,
                                         at::kLong,  at::kBool,   at::kComplexFloat, at::kComplexDouble};
inline const ReduceOp kReduceOps[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kProduct, ReduceOp::kMin,
                                      ReduceOp::kMax, ReduceOp::kAnd,  ReduceOp::kOr};
const char* name_of(ReduceOp op);

/// Whether the operation is defined for the dtype, whatever the engine.
bool is_meaningful(ReduceOp op, at::ScalarType dtype);

/// Whole numbers, different on every rank, whose reduction over up to 8 ranks is exact in every dtype: [elements].
/// `salt` makes different operations' values different.
at::Tensor values_of(int rank, at::ScalarType dtype, ReduceOp op, int64_t elements, int salt = 0);
/// The definition: rank 0 op rank 1 op ..., elementwise.
at::Tensor reduced(ReduceOp op, const std::vector<at::Tensor>& all);

/// One operation to try. `elements` are those of a rank's part: all of an all_reduce, the output of a reduce_scatter.
struct Trial {
  at::ScalarType dtype = at::kFloat;
  ReduceOp op = ReduceOp::kSum;
  int64_t elements = 0;
  int root = 0;           ///< taken modulo the group's size
  bool resident = false;  ///< in memory from Group::allocate
  int salt = 0;           ///< also the tag of messages
  bool strided = false;   ///< every tensor, in and out, is every other element of its memory
};
std::ostream& operator<<(std::ostream& out, const Trial& trial);

/// An operation in flight. check() is to be called once it is done, and checks outputs and inputs.
struct Started {
  std::vector<Work> works;
  std::function<void()> check;
  at::Tensor result;  ///< undefined where this rank gets none

  void wait_and_check() const {
    for (const Work& work : works) work.wait();
    check();
  }
};

struct Operation {
  const char* name;
  bool reduces;  ///< looks at Trial::op
  Started (*start)(const Group& group, const Trial& trial);
};
const std::vector<Operation>& operations();

void expect_same(const at::Tensor& actual, const at::Tensor& expected, const std::string& what);

}  // namespace lockstep::testing
