// Ranks that mpirun has started: run_ranks() runs its body on the first ranks of MPI_COMM_WORLD, in a communicator of
// their own, and the others wait for the next one. So one mpirun serves a whole binary, and main() is here.

#include <lockstep/mpi.h>

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "collectives/engines.h"
#include "mpi/mpi_ranks.h"

namespace lockstep::testing {
namespace {

int rank_in_world() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

/// MPI_Barrier would spin, on cores that the ranks of a smaller test need.
void wait_for_all() {
  MPI_Request request;
  MPI_Ibarrier(MPI_COMM_WORLD, &request);
  for (int done = 0; !done; std::this_thread::sleep_for(std::chrono::microseconds(500)))
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
}

/// A test that hangs ends the program, and so mpirun ends all ranks.
class Deadline : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override { ::alarm(240); }
  void OnTestEnd(const ::testing::TestInfo&) override { ::alarm(0); }
};

/// Rank 0 prints what GoogleTest prints, the others their failures.
class FailuresAlone : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.failed())
      std::fprintf(stderr, "rank %d: %s:%d\n%s\n", rank_in_world(), result.file_name() ? result.file_name() : "?",
                   result.line_number(), result.message());
  }
};

}  // namespace

void run_ranks(int count, const std::function<void(Context&)>& body, std::chrono::milliseconds, ContextOptions options,
               const std::string& machines) {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  ASSERT_LE(count, size) << "mpirun has started too few ranks";
  const int rank = rank_in_world();
  wait_for_all();
  MPI_Comm chosen;
  MPI_Comm_split(MPI_COMM_WORLD, rank < count ? 0 : MPI_UNDEFINED, rank, &chosen);
  if (chosen != MPI_COMM_NULL) {
    ::testing::ScopedTrace trace(__FILE__, __LINE__, "rank " + std::to_string(rank) + " of " + std::to_string(count));
    if (machines.empty())
      ::unsetenv("LOCKSTEP_MACHINE");
    else
      ::setenv("LOCKSTEP_MACHINE", machines.substr(static_cast<size_t>(rank), 1).c_str(), 1);
    options.join_timeout = std::chrono::seconds(30);
    options.collective_timeout =
        std::min<std::chrono::milliseconds>(options.collective_timeout, std::chrono::minutes(2));
    try {
      Context context = mpi_context(chosen, options);
      body(context);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    MPI_Comm_free(&chosen);
  }
}

std::string name_of(const Engine& engine) {
  return std::to_string(engine.world_size) + (engine.backend.empty() ? "" : "_" + engine.backend) +
         (engine.machines.empty() ? "" : "_" + engine.machines);
}

void run_ranks(const Engine& engine, const std::function<void(Context&)>& body) {
  run_ranks(engine.world_size, body, std::chrono::seconds(60), {.backend = engine.backend, .announce = false},
            engine.machines);
}

const std::vector<Engine>& engines() {
  static const std::vector<Engine> all = {
      {1, "mpi"}, {2, "mpi"}, {3, "mpi"}, {4, "mpi"}, {3, "hierarchical", "aab"}, {4, "hierarchical", "aabb"}};
  return all;
}

/// Returns what main() does after MPI_Finalize(): whether operations then fail and leaving does no harm.
std::function<bool()> context_that_outlives_mpi() {
  ::unsetenv("LOCKSTEP_MACHINE");
  auto left = std::make_shared<Context>(mpi_context(MPI_COMM_WORLD, {.backend = "mpi", .announce = false}));
  left->group().barrier();
  return [left]() mutable {
    std::string text = left->world_size() == 1 ? "MPI has been finalized: nothing is sent" : "no error";
    try {
      left->group().barrier();
    } catch (const Error& error) {
      text = error.what();
    }
    left.reset();
    const bool is_named = text.find("MPI has been finalized") != std::string::npos;
    if (!is_named) std::fprintf(stderr, "after MPI_Finalize(): %s\n", text.c_str());
    return is_named;
  };
}

bool any_thread_may_call() {
  int level = 0;
  MPI_Query_thread(&level);
  return level == MPI_THREAD_MULTIPLE;
}

}  // namespace lockstep::testing

int main(int argc, char** argv) {
  const bool multiple = argc > 1 && std::string(argv[1]) == "--multiple";
  int level = 0;
  MPI_Init_thread(&argc, &argv, multiple ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED, &level);
  ::testing::InitGoogleTest(&argc, argv);
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  listeners.Append(new lockstep::testing::Deadline);
  if (lockstep::testing::rank_in_world() != 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new lockstep::testing::FailuresAlone);
  }
  int code = RUN_ALL_TESTS();
  lockstep::testing::wait_for_all();
  MPI_Allreduce(MPI_IN_PLACE, &code, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  const auto outlives_mpi = lockstep::testing::context_that_outlives_mpi();
  MPI_Finalize();
  return code | (outlives_mpi() ? 0 : 1);
}
