#include <lockstep/spawn.h>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/clock.h"
#include "launch/launched.h"
#include "launch/process/own_program.h"
#include "rank_page/rank_board.h"

// The ranks of a test are this program again, with arguments that select that test alone. What they need to know about
// the test's process is in their environment.

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

/// The ranks run only the present test.
SpawnOptions this_test() {
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  return {.same_arguments = false,
          .arguments = {std::string("--gtest_filter=") + test->test_suite_name() + "." + test->name(),
                        "--gtest_also_run_disabled_tests", "--gtest_brief=1"}};
}

/// In a rank of a later call, spawn() returns at once and throws nothing.
bool in_a_rank() { return std::getenv("LOCKSTEP_SPAWN") != nullptr; }

/// A folder of the test, the same in its ranks.
class Spawn : public testing::Test {
 protected:
  static constexpr const char* kFolder = "LOCKSTEP_TEST_FOLDER";

  Spawn() {
    if (const char* folder = std::getenv(kFolder)) {
      path_ = folder;
      return;
    }
    own_.emplace();
    path_ = own_->path();
    fs::current_path(path_);
    ::setenv(kFolder, path_.c_str(), 1);
  }
  ~Spawn() override {
    if (!own_) return;
    fs::current_path("/");
    ::unsetenv(kFolder);
  }

  /// From any process.
  void note(const std::string& name) const { std::ofstream(path_ / name, std::ios::app) << "x"; }
  std::string noted(const std::string& name) const { return read_file(path_ / name); }

  std::optional<TemporaryFolder> own_;
  fs::path path_;
};

TEST_F(Spawn, RunsTheFunctionOnEveryRank) {
  for (const int ranks : {1, 2, 3}) {
    const std::string before = "before" + std::to_string(ranks);
    note(before);
    spawn(
        ranks,
        [&](int rank) {
          note("rank" + std::to_string(rank) + "of" + std::getenv("WORLD_SIZE"));
          if (std::getenv("RANK") != std::to_string(rank)) throw std::runtime_error("another rank");
          if (std::getenv("LOCKSTEP_RUN_DIR") != nullptr) throw std::runtime_error("there is a run folder");
        },
        this_test());
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_EQ(noted("rank" + std::to_string(rank) + "of" + std::to_string(ranks)), "x");
  }
  // As documented: the code before a call runs again in its ranks, and in those of later calls.
  EXPECT_EQ(noted("before1"),
            "xx"
            "xx"
            "xxx");
  EXPECT_EQ(noted("before3"), "xxxx");
  EXPECT_FALSE(fs::exists("runs")) << "no folder is made";
}

TEST_F(Spawn, AnExceptionTravelsWithItsRank) {
  for (const int ranks : {2, 3}) {
    const auto start = Clock::now();
    try {
      spawn(
          ranks,
          [](int rank) {
            if (rank == 1) throw std::runtime_error("no space for the moon");
            std::this_thread::sleep_for(std::chrono::minutes(1));
          },
          this_test());
      EXPECT_TRUE(in_a_rank()) << "nothing was thrown";
    } catch (const RankError& error) {
      EXPECT_EQ(error.what(), "rank 1 of " + std::to_string(ranks) + " failed: no space for the moon");
      EXPECT_EQ(error.rank(), 1);
      EXPECT_EQ(error.exit_code(), 40);
    }
    EXPECT_LT(seconds_since(start), 4) << "the others are stopped";
  }
}

TEST_F(Spawn, AHangEndsWhenTheOptionSaysSo) {
  // The ranks have no Context here: their pages say that rank 0 waits for rank 1, which sleeps.
  const auto start = Clock::now();
  auto options = this_test();
  options.hang_timeout = std::chrono::seconds(1);
  try {
    spawn(
        2,
        [](int rank) {
          auto& page = own_page();
          page.set_phase(RankStatus::Phase::kJoined);
          if (rank == 0) page.start_operation(1, "barrier", "", 0, nullptr, 0, Clock::now());
          std::this_thread::sleep_for(std::chrono::minutes(1));
        },
        options);
    EXPECT_TRUE(in_a_rank()) << "nothing was thrown";
  } catch (const RankError& error) {
    EXPECT_EQ(error.rank(), 1);
    EXPECT_EQ(error.exit_code(), 43);
    EXPECT_NE(std::string(error.what()).find("rank 1 has not reached barrier #1"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("raise SpawnOptions::hang_timeout (1.00 s)"), std::string::npos)
        << error.what();
  }
  EXPECT_LT(seconds_since(start), 8);
  if (in_a_rank()) return;
  options.hang_timeout = milliseconds(0);
  EXPECT_THROW(spawn(
                   2, [](int) {}, options),
               Error);
}

TEST_F(Spawn, ARankIsGivenTheGraceOfTheOptions) {
  auto options = this_test();
  options.grace = milliseconds(100);
  const auto start = Clock::now();
  try {
    spawn(
        2,
        [](int rank) {
          ::signal(SIGTERM, SIG_IGN);
          if (rank == 0) throw std::runtime_error("on purpose");
          std::this_thread::sleep_for(std::chrono::minutes(1));
        },
        options);
    EXPECT_TRUE(in_a_rank()) << "nothing was thrown";
  } catch (const RankError&) {
  }
  EXPECT_LT(seconds_since(start), 3) << "was 5 s whatever the rank was to save";
}

TEST_F(Spawn, AKilledRankIsNamed) {
  try {
    spawn(
        3,
        [](int rank) {
          if (rank == 2) ::raise(SIGKILL);
          std::this_thread::sleep_for(std::chrono::minutes(1));
        },
        this_test());
    EXPECT_TRUE(in_a_rank()) << "nothing was thrown";
  } catch (const RankError& error) {
    EXPECT_EQ(error.rank(), 2);
    EXPECT_EQ(error.exit_code(), 41);
    EXPECT_NE(std::string(error.what()).find("SIGKILL"), std::string::npos) << error.what();
  }
}

TEST_F(Spawn, GoesOnAfterAFailure) {
  try {
    spawn(
        2, [](int) { throw 5; }, this_test());
    EXPECT_TRUE(in_a_rank()) << "nothing was thrown";
  } catch (const RankError&) {
  }
  spawn(
      2, [&](int) { note("second"); }, this_test());
  EXPECT_EQ(noted("second"), "xx");
}

TEST_F(Spawn, IsRefusedInARank) {
  try {
    spawn(
        1, [](int) { spawn(1, [](int) {}); }, this_test());
    EXPECT_TRUE(in_a_rank()) << "nothing was thrown";
  } catch (const RankError& error) {
    EXPECT_NE(std::string(error.what()).find("inside a function"), std::string::npos) << error.what();
  }
  if (in_a_rank()) return;
  ::setenv("RANK", "0", 1);
  ::setenv("WORLD_SIZE", "1", 1);
  EXPECT_THROW(spawn(
                   1, [](int) {}, this_test()),
               Error);
  ::unsetenv("RANK");
  ::unsetenv("WORLD_SIZE");
  EXPECT_THROW(spawn(
                   0, [](int) {}, this_test()),
               Error);
}

TEST_F(Spawn, ARankThatGoesAnotherWayIsAnError) {
  for (const char* arguments : {"--gtest_filter=OwnProgram.*", "--gtest_list_tests"}) {
    try {
      spawn(2, [](int) {}, {.same_arguments = false, .arguments = {arguments}});
      EXPECT_TRUE(in_a_rank()) << "nothing was thrown";
    } catch (const RankError& error) {
      EXPECT_NE(std::string(error.what()).find("before it reached this call"), std::string::npos) << error.what();
    }
  }
}

/// Started by the next test alone.
TEST_F(Spawn, DISABLED_Waits) {
  spawn(
      2,
      [&](int) {
        note("waiting");
        std::this_thread::sleep_for(std::chrono::minutes(1));
      },
      this_test());
}

TEST_F(Spawn, NothingIsLeftWhenTheProgramIsKilled) {
  for (const int signal : {SIGKILL, SIGINT}) {
    fs::remove(path_ / "waiting");
    const std::string mark = std::string(kFolder) + "=" + path_.string();
    const pid_t program = ::fork();
    if (program == 0) {
      const int null = ::open("/dev/null", O_RDWR);
      for (const int fd : {1, 2}) ::dup2(null, fd);
      ::execl(own_program().c_str(), "spawn_test", "--gtest_filter=Spawn.DISABLED_Waits",
              "--gtest_also_run_disabled_tests", nullptr);
      ::_exit(126);
    }
    EXPECT_TRUE(eventually([&] { return noted("waiting") == "xx"; }));
    ::kill(program, signal);
    int status = 0;
    EXPECT_TRUE(eventually([&] { return ::waitpid(program, &status, WNOHANG) == program; }));
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << status;
    // Every process of the run carries the folder in its environment; this one does, too, but not since its start.
    EXPECT_TRUE(eventually(
        [&] {
          for (const auto& entry : fs::directory_iterator("/proc"))
            if (read_file(entry.path() / "environ").find(mark) != std::string::npos) return false;
          return true;
        },
        milliseconds(1000)));
  }
}

TEST(OwnProgram, KnowsItself) {
  EXPECT_EQ(fs::path(own_program()).filename(), "spawn_test");
  EXPECT_FALSE(own_arguments().empty());
}

}  // namespace
}  // namespace lockstep
