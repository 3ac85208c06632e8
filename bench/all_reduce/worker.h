#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "case.h"

namespace lockstep::bench {

/// One rank of a system under test. The same worker drives them all, so that they are measured alike.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// One line.
  virtual std::string version() const = 0;
  /// Empty if the system can do this, else the reason.
  virtual std::string why_not(const Case& wanted) const = 0;
  /// Memory that the system itself hands out. All ranks call it together; only if why_not() is silent on kResident.
  virtual std::shared_ptr<std::byte> allocate_resident(size_t bytes) = 0;
  /// The next run()s are of this case on this memory; `input` is `output` for what is in place.
  virtual void prepare(const Case& wanted, std::byte* input, std::byte* output) = 0;
  /// One operation, until this rank's result is there.
  virtual void run() = 0;
  virtual void barrier() = 0;
};

/// Takes commands from the socket named by argv's `--socket PATH` until `quit`, and returns the exit status. Every rank
/// has a connection of its own and sleeps in it between commands:
///
///     check CASE              -> ok | no REASON | wrong TEXT
///     time CASE WARM N BATCH  -> times NS...        N samples, each the mean of BATCH operations back to back
///     quit
///
/// A rank whose connection breaks ends at once, for its peers may be gone too.
int serve(Engine& engine, int argc, char** argv);

}  // namespace lockstep::bench
