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

/// What is started.
struct RunPlan {
  int ranks = 2;
  std::vector<std::string> options;   ///< of lockstep run
  std::vector<std::string> words;     ///< NAME=VALUE of faultbox_rank
  std::vector<std::string> program;   ///< instead of faultbox_rank and its words
  std::vector<std::string> launcher;  ///< instead of lockstep run and its options
  bool terminal = false;              ///< on a terminal of its own, instead of pipes
  int64_t run_folder_bytes = 0;       ///< the run folder is a file system of this size; 0: it is an ordinary folder
  std::shared_ptr<TemporaryFolder> folder;  ///< of an earlier run, to go on in; empty: a new one
};

/// A launcher with its ranks: started, watched, and looked over when it has ended. Nothing here waits for ever; what is
/// left is killed in the end. Its processes carry a mark in their environment, by which they are found whatever becomes
/// of them.
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
  /// The processes of it that live.
  std::vector<pid_t> processes() const { return marked_processes(mark_); }
  /// The process that is this rank; 0 as long as there is none.
  pid_t find_rank(int rank) const;

  /// Takes output until the condition holds or the launcher has ended; false when the time is over or it has ended.
  bool wait_until(const std::function<bool()>& condition, std::chrono::milliseconds timeout);
  void wait_for(std::chrono::microseconds time);
  /// Takes output until the launcher has ended; false, and all is killed, when the time is over.
  bool wait(std::chrono::milliseconds timeout);
  /// The terminal is closed.
  void hang_up() { out_.reset(); }

  bool ended() const { return ended_ns_ != 0; }
  int exit_code() const { return exit_code_; }  ///< minus the signal that killed it
  int64_t started_ns() const { return started_ns_; }
  int64_t ended_ns() const { return ended_ns_; }
  /// When the process that is this rank ended, as was seen while output was taken; 0: it was not seen.
  int64_t rank_ended_ns(int rank) const { return watched_[static_cast<size_t>(rank)].ended_ns; }
  int64_t printed_bytes() const { return printed_bytes_; }
  /// What a machine that is not left to them has taken from the run's processes since then, and from this one, which
  /// only sleeps, in all. Bounds are wider by it.
  int64_t lag_ns(int64_t since_ns) const { return lag_ns_ + starvation_.since(since_ns); }
  void look_for_starvation();
  Report report() const;
  /// What came on its stderr so far.
  const std::vector<Line>& lines() const { return lines_; }
  /// What rank 0 of a training came to; empty where it wrote nothing.
  std::string result() const { return read_file(path("result")); }

  /// After the end: what is wrong with what it held and what it left, one line each.
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

/// Launchers that run now: of the children of this process they are not to be taken for orphans.
std::set<pid_t> running_launchers();

}  // namespace lockstep::faultbox
