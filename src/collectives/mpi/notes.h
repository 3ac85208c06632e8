#pragma once

#include <string>
#include <vector>

#include "collectives/mpi/board.h"
#include "collectives/mpi/message_queue.h"

namespace lockstep::mpi_engine {

/// The notes by which ranks update the Board: small messages with their own tag. Guarded by the pump's mutex.
class Notes {
 public:
  static constexpr int kTag = 1;

  Notes(Port& port, Board& board, int rank, int world_size)
      : port_(port), board_(board), rank_(rank), world_size_(world_size) {}

  /// A message to each other rank, to be posted. Makes no MPI calls.
  std::vector<MessagePtr> messages_of(const std::string& note) const;
  /// Reads arrived notes. Returns whether there were any.
  bool read();
  /// Reads notes in every n-th call.
  bool read_now_and_then();

 private:
  Port& port_;
  Board& board_;
  const int rank_, world_size_;
  unsigned polls_ = 0;  // without checking for notes
};

}  // namespace lockstep::mpi_engine
