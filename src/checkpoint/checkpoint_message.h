#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "collectives/cause.h"

namespace lockstep {

/// One rank's message to the others about a save or a resume. Fields that do not apply to the outcome stay empty.
struct CheckpointMessage {
  enum class Outcome : uint8_t {
    kDone,      ///< `text`, `state` and `steps` hold the result
    kNothing,   ///< no save is due, or there is no checkpoint
    kFailed,    ///< `text` has the reason
    kDiverged,  ///< `text` describes the difference between ranks
    kInSlices,  ///< no error so far; now every rank sends rank 0 its slices
  };

  Outcome outcome = Outcome::kDone;
  int64_t steps = 0;         ///< until rank 0 is asked again whether a save is due
  int64_t step_on_disk = 0;  ///< for a resume: step of the newest checkpoint in the folder
  std::string text;          ///< a file's name, the lines to compare, or the error
  std::string state;         ///< the sender's own state, as the bytes of a .pt file

  std::string encode() const;
  /// Throws Error for bytes that encode() does not produce. `rank` is the sender.
  static CheckpointMessage decode(std::string bytes, int rank);

  bool operator==(const CheckpointMessage&) const = default;
};

/// Returns the message that `body` fills in, starting from an empty one; kFailed with the exception's text if it
/// throws.
CheckpointMessage attempt(const std::function<void(CheckpointMessage&)>& body);

}  // namespace lockstep
