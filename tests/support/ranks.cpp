#include "support/ranks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "base/clock.h"
#include "base/socket.h"
#include "rendezvous/key_value_server.h"

namespace lockstep::testing {
namespace {

[[noreturn]] void be_rank(int rank, int count, FileDescriptor store, const ContextOptions& options,
                          const std::function<void(Context&)>& body) {
  const auto set = [](const char* name, int value) { ::setenv(name, std::to_string(value).c_str(), 1); };
  set("RANK", rank);
  set("LOCAL_RANK", rank);
  set("WORLD_SIZE", count);
  set("LOCAL_WORLD_SIZE", count);
  set("LOCKSTEP_STORE_FD", store.release());
  int code = 0;
  try {
    ::testing::ScopedTrace trace(__FILE__, __LINE__, "rank " + std::to_string(rank) + " of " + std::to_string(count));
    Context context(options);
    body(context);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d of %d: %s\n", rank, count, error.what());
    code = 2;
  }
  if (::testing::Test::HasFailure()) code = 1;
  std::fflush(nullptr);
  ::_exit(code);
}

class RankProcesses {
 public:
  RankProcesses(int count, const ContextOptions& options, const std::string& machines,
                const std::function<void(Context&)>& body) {
    std::fflush(nullptr);
    for (int rank = 0; rank < count; ++rank) {
      SocketPair sockets = make_socket_pair();
      const pid_t pid = ::fork();
      if (pid == 0) {
        server_ = {};
        sockets.first.reset();
        if (!machines.empty()) ::setenv("LOCKSTEP_MACHINE", machines.substr(static_cast<size_t>(rank), 1).c_str(), 1);
        be_rank(rank, count, std::move(sockets.second), options, body);
      }
      server_.add_client(std::move(sockets.first));
      pids_.push_back(pid);
    }
  }

  ~RankProcesses() {
    for (pid_t pid : pids_) {
      if (pid == 0) continue;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }

  /// Serves the store until all ranks have ended or the deadline has passed.
  void serve(const Deadline& deadline) {
    while (reap() > 0 && !deadline.passed()) {
      std::vector<pollfd> polled;
      server_.append_polled(polled);
      ::poll(polled.data(), polled.size(), 5);
      for (const pollfd& ready : polled) server_.handle(ready);
    }
    for (size_t rank = 0; rank < pids_.size(); ++rank)
      if (pids_[rank] != 0) ADD_FAILURE() << "rank " << rank << " of " << pids_.size() << " is not done in time";
  }

 private:
  size_t reap() {
    size_t left = 0;
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      int status = 0;
      if (pids_[rank] == 0) continue;
      if (::waitpid(pids_[rank], &status, WNOHANG) == 0) {
        ++left;
        continue;
      }
      pids_[rank] = 0;
      EXPECT_TRUE(WIFEXITED(status)) << "rank " << rank << " was killed by signal " << WTERMSIG(status);
      EXPECT_EQ(WEXITSTATUS(status), 0) << "rank " << rank << " failed";
    }
    return left;
  }

  KeyValueServer server_;
  std::vector<pid_t> pids_;  ///< 0: ended
};

}  // namespace

void run_ranks(int count, const std::function<void(Context&)>& body, std::chrono::milliseconds timeout,
               ContextOptions options, const std::string& machines) {
  RankProcesses ranks(count, options, machines, body);
  ranks.serve(Deadline(timeout));
}

std::string name_of(const Engine& engine) {
  return std::to_string(engine.world_size) + (engine.backend.empty() ? "" : "_" + engine.backend) +
         (engine.machines.empty() ? "" : "_" + engine.machines);
}

void run_ranks(const Engine& engine, const std::function<void(Context&)>& body) {
  run_ranks(engine.world_size, body, std::chrono::seconds(60), {.backend = engine.backend, .announce = false},
            engine.machines);
}

}  // namespace lockstep::testing
