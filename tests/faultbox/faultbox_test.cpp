#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "base/file_descriptor.h"
#include "base/usable_cores.h"
#include "faultbox/cases.h"
#include "faultbox/starvation.h"

// That faultbox notices what it is meant to notice.

namespace lockstep::faultbox {
namespace {

bool any_has(const std::vector<std::string>& lines, const std::string& part) {
  return std::any_of(lines.begin(), lines.end(),
                     [&](const std::string& line) { return line.find(part) != std::string::npos; });
}

std::vector<Line> lines_of(std::initializer_list<const char*> texts) {
  std::vector<Line> lines;
  for (const char* text : texts) lines.push_back({static_cast<int64_t>(lines.size()) + 1, text});
  return lines;
}

TEST(FaultboxReport, CulpritDoubtsAndTheFirstLineOfThem) {
  const Report report =
      read_report(lines_of({"lockstep: 3 ranks share 2 cores",
                            "lockstep: rank 2: killed by SIGKILL (Killed); stopping the other ranks",
                            "lockstep: rank 2 of 5 failed first: killed by SIGKILL (Killed)",
                            "  unsure    rank 0, 3-4 failed at the same time; which rank failed first is not known",
                            "lockstep: ends with exit code 41"}),
                  "", 41);
  EXPECT_EQ(report.culprit, 2);
  EXPECT_EQ(report.headline, "rank 2 of 5 failed first: killed by SIGKILL (Killed)");
  EXPECT_EQ(report.also_suspect, (std::vector<int>{0, 3, 4}));
  EXPECT_EQ(report.known_ns, 2);
  EXPECT_TRUE(report.problems.empty());
}

TEST(FaultboxStarvation, IsWhatProcessesWaitForAProcessor) {
  const auto busy = [](int cpu) {
    const pid_t child = ::fork();
    if (child != 0) return child;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    ::sched_setaffinity(0, sizeof set, &set);
    for (volatile int i = 0;;) i = i + 1;
  };
  const int cpu = allowed_cpus().front();
  const pid_t idle = ::fork();
  if (idle == 0)
    for (;;) ::pause();
  const std::vector<pid_t> ranks = {busy(cpu), busy(cpu)};
  Starvation starvation;
  const int64_t start = now_ns();
  EXPECT_EQ(starvation.since(start), 0);
  eventually(
      [&] {
        starvation.look(idle, ranks, now_ns());
        return starvation.since(start) > 200'000'000;
      },
      std::chrono::milliseconds(20000));
  // Of two that share a processor one waits at any time, so both together no longer than the time that has passed.
  const int64_t waited = starvation.since(start), middle = now_ns();
  EXPECT_GT(waited, 200'000'000);
  EXPECT_LT(starvation.since(middle), waited) << "what was before does not count";
  for (const pid_t child : {idle, ranks[0], ranks[1]}) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  starvation.look(idle, ranks, now_ns() + 1'000'000'000);
  EXPECT_EQ(starvation.since(now_ns()), 0) << "they are gone";
}

TEST(FaultboxReport, AJsonThatContradictsTheBlock) {
  const auto lines = lines_of({"lockstep: rank 1 of 2 failed first: exit code 3"});
  const std::string rest = R"("how_known": {}, "state_kept": null, "next_command": "", "last_lines": [])";
  const auto problems = [&](int code, int rank) {
    const std::string json = R"({"exit_code": )" + std::to_string(code) + R"(, "culprit": {"rank": )" +
                             std::to_string(rank) +
                             R"(, "host": "a", "pid": 1, "what": null, "last_collective": null}, )" + rest + "}";
    return read_report(lines, json, 40).problems;
  };
  EXPECT_TRUE(problems(40, 1).empty());
  EXPECT_TRUE(any_has(problems(41, 1), "exit_code"));
  EXPECT_TRUE(any_has(problems(40, 0), "names rank 0"));
  EXPECT_TRUE(any_has(read_report(lines, R"({"exit_code": 40})", 40).problems, "no culprit"));
  EXPECT_TRUE(any_has(read_report(lines, "{", 40).problems, "not a JSON object"));
}

TEST(FaultboxAudit, AProcessThatIsLeftIsFoundAndKilled) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  faultbox::Run run({.program = {"-c", "setsid sleep 60 >/dev/null 2>&1 & exit 41"}, .launcher = {"/bin/sh"}});
  EXPECT_TRUE(run.wait(std::chrono::seconds(10)));
  EXPECT_EQ(run.exit_code(), 41);
  EXPECT_TRUE(any_has(run.audit(), "a process is left"));
  EXPECT_TRUE(eventually([&] { return run.processes().empty(); }, std::chrono::seconds(2)));
  EXPECT_TRUE(eventually([] { return reap_orphans({}).empty(); }, std::chrono::seconds(2)));
}

TEST(FaultboxAudit, AWrongCulpritIsWrong) {
  faultbox::Run run({.program = {"-c", "echo 'lockstep: rank 0 of 2 failed first: exit code 1' >&2; exit 40"},
                     .launcher = {"/bin/sh"}});
  EXPECT_TRUE(run.wait(std::chrono::seconds(10)));
  Outcome right, wrong;
  expect(right, run, {.codes = {40}, .culprits = {0}});
  expect(wrong, run, {.codes = {41}, .culprits = {1}});
  EXPECT_EQ(right.problems, std::vector<std::string>{"there is no report.json"});
  EXPECT_TRUE(any_has(wrong.problems, "exit code 40 instead of 41"));
  EXPECT_TRUE(any_has(wrong.problems, "names rank 0 instead of 1"));
}

TEST(FaultboxAudit, SocketsAndNamedSegmentsAreFound) {
  const FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::listen(socket.get(), 1), 0);
  const std::string name = "/lockstep-faultbox-test-" + std::to_string(::getpid());
  const FileDescriptor segment(::shm_open(name.c_str(), O_RDWR | O_CREAT, 0600));
  ASSERT_TRUE(segment);
  struct stat status {};
  ::fstat(socket.get(), &status);
  const Holdings holdings = holdings_of({::getpid()});
  ::shm_unlink(name.c_str());
  EXPECT_TRUE(any_has(holdings.named_segments, name));
  EXPECT_EQ(sockets_in_kernel({status.st_ino}, false).size(), 1U);
  EXPECT_TRUE(holdings.sockets.contains(status.st_ino));
  EXPECT_TRUE(sockets_in_kernel({}, true).empty());
}

TEST(FaultboxDraw, RepeatsItselfAndDiffersByInstance) {
  const auto draw = [](uint64_t seed, int instance) {
    Draw numbers(seed, "kill", instance);
    return std::vector<int64_t>{numbers.number(0, 1 << 30), numbers.number(0, 1 << 30)};
  };
  EXPECT_EQ(draw(7, 3), draw(7, 3));
  EXPECT_NE(draw(7, 3), draw(7, 4));
  EXPECT_NE(draw(7, 3), draw(8, 3));
}

}  // namespace
}  // namespace lockstep::faultbox
