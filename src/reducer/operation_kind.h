#pragma once

#include <string>

namespace lockstep {

/// How the gradients of an operation's inputs depend on a positive factor of an input.
enum class OperationKind {
  kLinear,         ///< moves, selects or adds elements: a factor of its inputs is a factor of the result
  kJoin,           ///< as kLinear; an input that takes no gradient is inserted as a constant
  kSum,            ///< as kLinear; if only one input takes a gradient, the other is a constant
  kKinked,         ///< a positive factor of its inputs is a factor of the result, if no input is constant
  kProduct,        ///< a factor of one input is a factor of the result
  kQuotient,       ///< as kProduct, for its first input
  kAddedProduct,   ///< its first input, and the product of the others
  kBiasedProduct,  ///< its last input, and the product of the others
  kAddedQuotient,  ///< its first input, and the second over the third
  kNonlinear,      ///< LibTorch's other operations
  kUnknown         ///< a program's own operations
};

/// `name` is the name of its node in autograd's graph, such as "PowBackward0".
OperationKind kind_of(const std::string& name);

}  // namespace lockstep
