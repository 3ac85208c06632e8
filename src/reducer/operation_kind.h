#pragma once

#include <string>

namespace lockstep {

/// How the gradients of an operation's inputs depend on a positive factor of an input.
enum class OperationKind {
  kLinear,     ///< it adds, chooses, moves or limits by nothing but zero: a factor of all inputs is one of the result
  kProduct,    ///< a factor of one input is one of the result
  kQuotient,   ///< the same, of its first input
  kNonlinear,  ///< LibTorch's others
  kUnknown     ///< a program's own
};

/// `name`: that of its node in autograd's graph, such as "PowBackward0".
OperationKind kind_of(const std::string& name);

}  // namespace lockstep
