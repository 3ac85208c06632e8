#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep::mpi_engine {

/// The MPI calls that the engine needs, without mpi.h: a program that includes mpi.h is bound to one MPI, and the
/// engine is not. The only implementation is mpi_port.cpp, in the library Lockstep::mpi.
/// The pump manages its threads. Calls throw Error with MPI's own text.
class Port {
 public:
  /// An MPI_Comm or MPI_Request, whatever their types.
  using Handle = uint64_t;

  virtual ~Port() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// Whether any thread may call MPI at any time. If not, only the thread that made the port may.
  virtual bool takes_any_thread() const = 0;
  /// MPI_THREAD_..., for messages.
  virtual const char* thread_level() const = 0;
  /// Whether MPI has been finalized, so that no more calls are allowed.
  virtual bool is_over() const = 0;
  virtual int largest_tag() const = 0;

  /// All ranks, in a communicator of our own, which must be closed like others.
  virtual Handle everybody() const = 0;
  /// Makes a communicator of these ranks in this order.
  /// REQUIRES: all of them call it at the same time.
  virtual Handle open(const std::vector<int>& ranks) = 0;
  /// Does nothing if an arrived message was never received: MPI would deliver it to the next communicator with the same
  /// number.
  virtual void close(Handle communicator) = 0;

  /// Starts a message. The memory must stay valid until test() returns true, or give_up() was called.
  virtual Handle send(Handle communicator, const void* data, size_t bytes, int to, int tag) = 0;
  virtual Handle receive(Handle communicator, void* data, size_t bytes, int from, int tag) = 0;
  /// Whether the message is over; its handle is then invalid. Throws if it failed, which also ends it.
  virtual bool test(Handle& message) = 0;
  /// Ends the message without success. A receive gets nothing more.
  virtual void give_up(Handle& message, bool is_sent) = 0;

  struct Arrival {
    int from;
    size_t bytes;
  };
  /// A message with this tag that could be received now, from any rank.
  virtual std::optional<Arrival> arrival(Handle communicator, int tag) = 0;
};

}  // namespace lockstep::mpi_engine
