#pragma once

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "collectives/shm/board.h"
#include "collectives/shm/local_world.h"
#include "collectives/shm/segment/bootstrap.h"
#include "support/exit_code.h"

// Ranks as forked children of the test, which form their group as real ranks do, and what such a process holds.
namespace lockstep::shm {

inline constexpr BootstrapOptions kSmall{.timeout = std::chrono::seconds(20), .resident_bytes = size_t{16} << 20};

inline World join(Board& board, int rank, int ranks, int& round, const BootstrapOptions& options = kSmall) {
  return bootstrap(
      rank, ranks, [&](const std::string& mine) { return board.all_gather(rank, round, mine); }, options);
}

inline int open_descriptors() {
  int count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

/// Segments of groups that this process has mapped.
inline int mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:lockstep ") != std::string::npos;
  return count;
}

inline int64_t sum_of_ranks(Communicator& group, size_t count, std::chrono::milliseconds timeout = kTestTimeout) {
  std::vector<int64_t> x(count, group.rank());
  group.run({.kind = OperationKind::kAllReduce,
             .type = DataType::kInt64,
             .count = count,
             .input = x.data(),
             .output = x.data()},
            timeout);
  return x[count - 1];
}

/// Forks `ranks` children; body's result is the child's exit code.
inline std::vector<pid_t> fork_ranks(int ranks, const std::function<int(int)>& body) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 99;
      try {
        code = body(rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      ::_exit(code);
    }
    children.push_back(child);
  }
  return children;
}

}  // namespace lockstep::shm
