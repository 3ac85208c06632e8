#pragma once

#include <string>

namespace lockstep {

/// How the gradients of an operation's inputs depend on a positive factor of an input.
enum class OperationKind {
  kLinear,         ///< it moves, selects or adds up elements: a factor of its inputs is one of the result
  kJoin,           ///< the same; an input that takes no gradient is put in as a constant
  kSum,            ///< the same; if one input alone takes a gradient, the other is a constant
  kKinked,         ///< a positive factor of its inputs is one of the result, if no constant is among them
  kProduct,        ///< a factor of one input is one of the result
  kQuotient,       ///< the same, of its first input
  kAddedProduct,   ///< its first input, and the product of the others
  kBiasedProduct,  ///< its last input, and the product of the others
  kAddedQuotient,  ///< its first input, and the second over the third
  kNonlinear,      ///< LibTorch's others
  kUnknown         ///< a program's own
};

/// `name`: that of its node in autograd's graph, such as "PowBackward0".
OperationKind kind_of(const std::string& name);

}  // namespace lockstep
