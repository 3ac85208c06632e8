#include "tour_command.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <thread>

#include "base/clock.h"
#include "base/shell_word.h"
#include "capture.h"
#include "launch/launch_error.h"
#include "launch/process/own_program.h"
#include "report/report.h"
#include "running_run.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;

constexpr const char* kProgram = "lockstep-tour";
constexpr std::chrono::milliseconds kLook(20);
constexpr seconds kPatience(60);  ///< for one event, on a busy machine

/// Next to the launcher in a build, in ../libexec in an installation.
std::string find_program(const fs::path& launcher) {
  std::error_code ignored;
  for (const fs::path& folder : {launcher.parent_path(), launcher.parent_path().parent_path() / "libexec" / "lockstep"})
    if (fs::is_regular_file(folder / kProgram, ignored)) return (folder / kProgram).string();
  throw LaunchError(kExitNotStarted, std::string(kProgram) + " is missing: it is neither beside " + launcher.string() +
                                         " nor in ../libexec/lockstep; build the target lockstep_tour");
}

/// runs/tour, or the first of runs/tour-2, runs/tour-3 ... that does not exist.
std::string new_folder() {
  std::string folder = "runs/tour";
  for (int number = 2; fs::exists(folder); ++number) folder = "runs/tour-" + std::to_string(number);
  return folder;
}

/// `lockstep run`, as a child that is never left behind.
class Child {
 public:
  explicit Child(const std::vector<std::string>& command) {
    std::vector<char*> words;
    for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    if (const int error = ::posix_spawn(&pid_, words[0], nullptr, nullptr, words.data(), ::environ); error != 0)
      throw LaunchError(kExitNotStarted, "cannot start " + command[0] + ": " + std::strerror(error));
  }
  ~Child() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGTERM);
    wait();
  }
  Child(const Child&) = delete;

  bool has_ended() {
    int status = 0;
    if (pid_ != 0 && ::waitpid(pid_, &status, WNOHANG) == pid_) note(status);
    return pid_ == 0;
  }
  int wait() {
    int status = 0;
    while (pid_ != 0)
      if (::waitpid(pid_, &status, 0) == pid_ || errno != EINTR) note(status);
    return exit_code_;
  }

 private:
  void note(int status) {
    pid_ = 0;
    exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  pid_t pid_ = 0;
  int exit_code_ = 0;
};

void say(const std::string& text) { std::cout << "\ntour: " << text << std::endl; }

void show(const std::vector<std::string>& words, const std::string& output) {
  std::cout << "$ lockstep";
  for (const std::string& word : words) std::cout << " " << shell_word(word);
  std::cout << "\n" << output << std::flush;
}

/// The run once it satisfies the condition; its record is missing for a moment while ranks are replaced.
RunningRun wait_for(Child& child, const std::string& folder, const std::string& what,
                    const std::function<bool(const RunningRun&)>& fits) {
  for (const Deadline deadline(kPatience); !child.has_ended() && !deadline.passed();
       std::this_thread::sleep_for(kLook)) {
    try {
      if (RunningRun run = find_run(folder); fits(run)) return run;
    } catch (const LaunchError&) {
    }
  }
  throw LaunchError(kExitHang, "the run in " + folder + (child.has_ended() ? " ended" : " has waited for a minute") +
                                   " before " + what + "; its logs are there");
}

/// Whether all ranks have made this many steps, including earlier starts.
std::function<bool(const RunningRun&)> at_step(int64_t step, int restarts) {
  return [=](const RunningRun& run) {
    if (!run.board || run.record.restarts < restarts) return false;
    for (int rank = 0; rank < run.ranks(); ++rank) {
      const RankStatus account = run.account_of(rank);
      if (account.first_step + account.steps < step && rank == 0) return false;
      if (account.steps < 5) return false;
    }
    return true;
  };
}

}  // namespace

TourCommand::TourCommand(CLI::App& app)
    : tour_(app.add_subcommand(
          "tour", "Train something small, kill a rank, resume, resize, and show the report: a quarter of a minute")) {
  tour_->add_option("-o,--run-dir", folder_, "A new folder for the run. Default: runs/tour")->type_name("DIR");
}

int TourCommand::run() const {
  const std::string launcher = own_program(), program = find_program(launcher);
  const std::string folder = folder_.empty() ? new_folder() : folder_;
  if (fs::exists(folder)) throw LaunchError(kExitStorage, folder + " already exists; give the name of a new folder");
  const std::vector<std::string> words = {"run", "-n",        "2",    "--elastic", "1:3",  "--virtual-ranks",
                                          "6",   "--run-dir", folder, "--",        program};
  say("two ranks fit a small network to a curve. Their number may change between 1 and 3; each step has six parts,\n"
      "shared out between them, so the result does not depend on it.");
  show(words, "");
  std::vector<std::string> command = words;
  command.insert(command.begin(), launcher);
  Child child(command);

  const RunningRun before = wait_for(child, folder, "its first 215 steps", at_step(215, 0));
  say("what each rank does now:");
  show({"status", folder}, capture({launcher, "status", folder}, kPatience).out);
  const pid_t victim = before.account_of(1).pid;
  say("now rank 1 is killed. The launcher starts both again, from the last state that was saved.");
  std::cout << "$ kill -9 " << victim << std::endl;
  ::kill(victim, SIGKILL);

  wait_for(child, folder, "it continued after the kill", at_step(400, 1));
  say("the run continues. Now it is to have three ranks: all save after the same step and leave, and three continue.");
  const Captured resized = capture({launcher, "resize", folder, "3"}, kPatience);
  show({"resize", folder, "3"}, resized.out + resized.err);
  if (resized.exit_code != 0) throw LaunchError(kExitHang, "the number of ranks did not change: " + resized.failure);
  wait_for(child, folder, "three ranks had made steps", at_step(500, 2));
  say("what each rank does now:");
  show({"status", folder}, capture({launcher, "status", folder}, kPatience).out);
  if (const int code = child.wait(); code != 0)
    throw LaunchError(kExitRankFailed, "the run ended with " + std::to_string(code) + "; " + folder + " says why");

  say("the training has ended. What happened, as a page:");
  const std::string page = write_report(folder, "");
  show({"report", folder}, page + "\n");
  say("open " + page +
      " in a browser: the loss, and under `starts` the kill, the resize, and the steps that were lost.\n"
      "The logs of all ranks are beside it. The program is tools/tour_rank.cpp in the sources.");
  return std::cout.good() ? kExitOk : kExitStorage;
}

}  // namespace lockstep
