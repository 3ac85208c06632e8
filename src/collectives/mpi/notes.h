#pragma once

#include <string>
#include <vector>

#include "collectives/mpi/board.h"
#include "collectives/mpi/message_queue.h"

namespace lockstep::mpi_engine {

/// The notes that ranks send each other, which make up the Board: small messages with a tag of their own. Guarded by
/// the pump's mutex.
class Notes {
 public:
  static constexpr int kTag = 1;

  Notes(Port& port, Board& board, int rank, int world_size)
      : port_(port), board_(board), rank_(rank), world_size_(world_size) {}

  /// A message for each other rank, to be posted. Calls no MPI.
  std::vector<MessagePtr> messages_of(const std::string& note) const;
  /// Takes in what has come. Whether there was any.
  bool read();
  /// Every so many calls.
  bool read_now_and_then();

 private:
  Port& port_;
  Board& board_;
  const int rank_, world_size_;
  unsigned polls_ = 0;  // that have not looked for notes
};

}  // namespace lockstep::mpi_engine
