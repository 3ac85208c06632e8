#include "launch/run_journal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/file_descriptor.h"

namespace lockstep {
namespace {

using EventJson = nlohmann::ordered_json;

constexpr size_t kMostUnwritten = 1 << 20;  ///< per file; later lines are lost

std::string line_of(const EventJson& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/false, EventJson::error_handler_t::replace) + "\n";
}

EventJson event(const char* name) { return {{"time_s", seconds_since_1970()}, {"event", name}}; }

}  // namespace

RunJournal::RunJournal(const std::string& folder, bool asked_for) : folder_(folder), writes_events_(asked_for) {
  if (folder_.empty()) return;
  forget_earlier_run(folder_);
  std::error_code ignored;
  std::filesystem::remove(folder_ + "/events.jsonl", ignored);
}

void RunJournal::add_event(const std::string& line, bool worth_a_file) {
  if (folder_.empty()) return;
  kept_back_ += line;
  writes_events_ = writes_events_ || worth_a_file;
  if (writes_events_) add("events.jsonl", std::exchange(kept_back_, {}));
}

/// Writes whole lines or none: a line cut short by a full disk would spoil the next. Unwritten lines are written when
/// there is room again.
void RunJournal::add(const std::string& file, const std::string& lines) {
  if (folder_.empty()) return;
  Unwritten& unwritten = unwritten_[file];
  if (unwritten.lines.size() + lines.size() <= kMostUnwritten) unwritten.lines += lines;
  const std::string path = folder_ + "/" + file;
  const FileDescriptor stream(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  struct stat before {};
  const bool writable = stream && ::fstat(stream.get(), &before) == 0;
  const auto size = static_cast<ssize_t>(unwritten.lines.size());
  if (writable && ::write(stream.get(), unwritten.lines.data(), unwritten.lines.size()) == size) {
    unwritten.lines.clear();
    return;
  }
  if (writable && ::ftruncate(stream.get(), before.st_size) != 0) unwritten.lines.clear();
  if (!std::exchange(unwritten.told, true)) troubles_.push_back(path + " could not be written");
}

void RunJournal::started(int start, const std::vector<long>& pids) {
  EventJson json = event("start");
  json["start"] = start;
  json["ranks"] = pids.size();
  json["pids"] = pids;
  add_event(line_of(json), false);
}

void RunJournal::rank_ended(int rank, const std::string& how, bool failed) {
  EventJson json = event("rank_ended");
  json["rank"] = rank;
  json["failed"] = failed;
  json["how"] = how;
  add_event(line_of(json), failed);
}

void RunJournal::said(const std::string& text) {
  EventJson json = event("message");
  json["text"] = text;
  add_event(line_of(json), true);
}

void RunJournal::start_ended(const StartRecord& record, const FailureReport& report, bool is_last) {
  EventJson json = event("start_ended");
  json["start"] = record.number;
  json["exit_code"] = record.exit_code;
  json["resized"] = record.resized;
  json["culprit"] = record.culprit < 0 ? EventJson(nullptr) : EventJson(record.culprit);
  json["headline"] = report.verdict.culprit ? EventJson(report.verdict.headline) : EventJson(nullptr);
  json["first_step"] = record.first_step;
  json["steps"] = record.steps;
  add_event(line_of(json), !is_last || record.exit_code != 0);
  // A run that was started once gets no line: there is nothing more to report.
  if (!is_last || record.number > 0) add("starts.jsonl", line_of_start(record));
}

void RunJournal::run_ended(int exit_code) {
  EventJson json = event("end");
  json["exit_code"] = exit_code;
  add_event(line_of(json), exit_code != 0);
}

std::string RunJournal::report_path(int restart) const {
  if (folder_.empty()) return "";
  return folder_ + "/" + (restart == 0 ? "report.json" : restart_report(restart));
}

void RunJournal::write_report(const FailureReport& report, int restart) {
  if (folder_.empty()) return;
  try {
    const std::string json = to_json(report);
    AtomicFile file(report_path(restart));
    file.write(json.data(), json.size());
    file.commit();
  } catch (const Error& error) {
    troubles_.push_back(error.what());
  }
  if (restart > 0) prune_restart_reports(folder_, restart);
}

}  // namespace lockstep
