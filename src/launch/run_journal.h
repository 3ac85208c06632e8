#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "launch/diagnosis/failure_report.h"
#include "launch/start_record.h"

namespace lockstep {

/// The files in a run's folder that report events to programs: events.jsonl as they happen, starts.jsonl after each
/// start, a report after each failure. docs/launcher.md names their fields. Without a folder nothing is written. A
/// write error is reported once by take_troubles(), and the run continues; the lines are written later, if there is
/// room again.
class RunJournal {
 public:
  /// Deletes the files of an earlier run in the folder. Empty: no folder. `asked_for`: the user named the folder;
  /// otherwise events are held back until one is worth a file, so that an uneventful run leaves nothing.
  RunJournal(const std::string& folder, bool asked_for);

  void started(int start, const std::vector<long>& pids);
  void rank_ended(int rank, const std::string& how, bool failed);
  void said(const std::string& text);
  /// A start has ended as `record` describes; the verdict is the report's.
  void start_ended(const StartRecord& record, const FailureReport& report, bool is_last);
  void run_ended(int exit_code);

  /// The report file of the failure before restart number `restart`; 0: of the end of the run.
  std::string report_path(int restart) const;
  void write_report(const FailureReport& report, int restart);

  std::vector<std::string> take_troubles() { return std::exchange(troubles_, {}); }

 private:
  void add_event(const std::string& line, bool worth_a_file);
  void add(const std::string& file, const std::string& lines);

  const std::string folder_;
  bool writes_events_;
  std::string kept_back_;
  struct Unwritten {
    std::string lines;
    bool told = false;
  };
  std::map<std::string, Unwritten> unwritten_;  // by the file's name
  std::vector<std::string> troubles_;
};

}  // namespace lockstep
