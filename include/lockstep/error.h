#pragma once

#include <stdexcept>
#include <string>

namespace lockstep {

/// Something in the world went wrong: a peer is gone, a file is short, ranks disagree. The text names what, where
/// and what to do about it. Misuse of the interface throws c10::Error (TORCH_CHECK) instead.
///
/// Thrown on the thread that called the library, never on an engine's thread. Where an operation fails on several
/// ranks, every one of them throws.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace lockstep
