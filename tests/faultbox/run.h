#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "faultbox/fault_page.h"
#include "faultbox/processes.h"
#include "faultbox/report.h"
#include "faultbox/starvation.h"
#include "support/temporary_folder.h"

namespace lockstep::faultbox {

/// What to start.
struct RunPlan {
  int ranks = 2;
  std::vector<std::string> options;         ///< for lockstep run
  std::vector<std::string> words;           ///< NAME=VALUE for faultbox_rank
  std::vector<std::string> program;         ///< instead of faultbox_rank and its words
  std::vector<std::string> launcher;        ///< instead of lockstep run and its options
  bool terminal = false;                    ///< on a terminal of its own, instead of pipes
  int64_t run_folder_bytes = 0;             ///< the run folder is a file system of this size; 0: an ordinary folder
  std::shared_ptr<TemporaryFolder> folder;  ///< of an earlier run, to continue in; empty: a new one
};

/// A launcher with its ranks: started, watched, and checked when it has ended. Nothing here waits for ever; whatever is
/// left is killed in the end. The processes carry a mark in their environment, so they are found whatever happens to
/// them.
class Run {
 public:
  static constexpr int kNoFileSystem = 125;  ///< exit code: the file system of run_folder_bytes could not be made

  explicit Run(RunPlan plan);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  pid_t pid() const { return pid_; }
  FaultPage& page() const { return *page_; }
  const std::shared_ptr<TemporaryFolder>& folder() const { return plan_.folder; }
  std::string path(const std::string& name) const { return (folder()->path() / name).string(); }
  /// Its living processes.
  std::vector<pid_t> processes() const { return marked_processes(mark_); }
  /// The process that is this rank; 0 while there is none.
  pid_t find_rank(int rank) const;

  /// Takes output until the condition holds (true), or the launcher has ended or the time is over (false).
  bool wait_until(const std::function<bool()>& condition, std::chrono::milliseconds timeout);
  void wait_for(std::chrono::microseconds time);
  /// Takes output until the launcher has ended. When the time is over it kills everything and returns false.
  bool wait(std::chrono::milliseconds timeout);
  /// Closes the terminal.
  void hang_up() { out_.reset(); }

  bool ended() const { return ended_ns_ != 0; }
  int exit_code() const { return exit_code_; }  ///< or minus the signal that killed it
  int64_t started_ns() const { return started_ns_; }
  int64_t ended_ns() const { return ended_ns_; }
  /// When the process that is this rank was seen to end, while output was taken; 0: it was not seen.
  int64_t rank_ended_ns(int rank) const { return watched_[static_cast<size_t>(rank)].ended_ns; }
  int64_t printed_bytes() const { return printed_bytes_; }
  /// The time that a busy machine has taken from the run's processes since then, and from this process, which
  /// only sleeps. Time limits are extended by it.
  int64_t lag_ns(int64_t since_ns) const { return lag_ns_ + starvation_.since(since_ns); }
  void look_for_starvation();
  Report report() const;
  /// What it has printed on stderr so far.
  const std::vector<Line>& lines() const { return lines_; }
  /// The result that rank 0 of a training wrote; empty if it wrote none.
  std::string result() const { return read_file(path("result")); }

  /// After the end: what is wrong with what it held and what it left behind, one line each.
  std::vector<std::string> audit();

 private:
  void start();
  [[noreturn]] void become(char* const* words, char* const* environment, int out, int err) const;
  void take(int timeout_ms);
  void watch_ranks();
  void read_from(FileDescriptor& fd, bool lines);
  bool reap();
  bool is_over(int64_t start_ns, std::chrono::milliseconds timeout) const;

  RunPlan plan_;
  std::string mark_;
  FaultPage* page_ = nullptr;
  pid_t pid_ = -1;
  FileDescriptor out_, err_;
  struct Watched {
    pid_t pid = 0;
    FileDescriptor fd;  ///< pidfd
    int64_t ended_ns = 0;
  };
  std::array<Watched, FaultPage::kMostRanks> watched_;
  std::string unfinished_line_;
  std::vector<Line> lines_;
  int64_t printed_bytes_ = 0, started_ns_ = 0, ended_ns_ = 0, lag_ns_ = 0;
  int exit_code_ = 0;
  bool sampled_ = false;
  Starvation starvation_;
  Holdings holdings_;
  std::vector<std::string> problems_;
};

/// Launchers that run now: children of this process that are not orphans.
std::set<pid_t> running_launchers();

}  // namespace lockstep::faultbox
