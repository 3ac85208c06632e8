#pragma once

#include <lockstep/cxx20.h>

#include <stdexcept>
#include <string>

namespace lockstep {

/// A failure outside the program's control: a peer is gone, a file is too short, ranks disagree. The text says what
/// happened, where, and what to do. Misuse of the interface throws c10::Error (TORCH_CHECK) instead.
///
/// Thrown on the thread that called the library, never on an engine's thread. If an operation fails on several ranks,
/// each of them throws.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace lockstep
