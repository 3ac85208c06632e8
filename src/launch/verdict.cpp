#include "launch/verdict.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "launch/launch_error.h"

namespace lockstep {
namespace {

/// Nothing that another rank does ends a rank so. SIGABRT is left out: an exception that nobody catches ends in it,
/// and "connection closed" may be that exception.
bool was_killed(const RankEnd& end) { return end.how.kind == ProcessEnd::Kind::kSignalled && end.how.value != SIGABRT; }

/// The program was there when it was looked for; what else can be wrong?
const char* start_hint(int error) {
  if (error == ENOEXEC) return " (neither a binary for this machine nor a script with a #! line)";
  if (error == ENOENT) return " (the interpreter that it names is missing)";
  return "";
}

std::string short_seconds(double seconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.*f", seconds < 10 ? 2 : 1, seconds);
  return text.data();
}

}  // namespace

Verdict judge(const std::vector<RankEnd>& ends, int stop_signal) {
  if (stop_signal != 0) return {.exit_code = 128 + stop_signal};
  const auto first = std::find_if(ends.begin(), ends.end(), [](const RankEnd& end) { return end.how.failed(); });
  if (first == ends.end()) return {.exit_code = kExitOk};
  std::vector<RankEnd> together;
  for (const auto& end : ends)
    if (end.how.failed() && end.wake_up == first->wake_up) together.push_back(end);
  if (std::any_of(together.begin(), together.end(), was_killed))
    std::erase_if(together, [](const RankEnd& end) { return !was_killed(end); });
  Verdict verdict{.exit_code = exit_code_of(together[0].how, {}), .culprit = together[0]};
  for (size_t i = 1; i < together.size(); ++i) verdict.also_suspect.push_back(together[i].rank);
  std::sort(verdict.also_suspect.begin(), verdict.also_suspect.end());
  return verdict;
}

int exit_code_of(const ProcessEnd& how, const std::deque<std::string>& tail) {
  switch (how.kind) {
    case ProcessEnd::Kind::kSignalled:
      return kExitRankKilled;
    case ProcessEnd::Kind::kNotStarted:
      return kExitNotStarted;
    case ProcessEnd::Kind::kExited:
      break;
  }
  const bool library_missing = how.value == 127 && std::any_of(tail.begin(), tail.end(), [](const std::string& line) {
                                 return line.find("error while loading shared libraries") != std::string::npos;
                               });
  return how.value == 0 ? kExitOk : library_missing ? kExitNotStarted : kExitRankFailed;
}

std::string describe(const ProcessEnd& how) {
  switch (how.kind) {
    case ProcessEnd::Kind::kExited:
      return "exit code " + std::to_string(how.value);
    case ProcessEnd::Kind::kNotStarted:
      return std::string("could not be started: ") + std::strerror(how.value) + start_hint(how.value);
    case ProcessEnd::Kind::kSignalled:
      break;
  }
  const char* name = ::sigabbrev_np(how.value);
  const char* text = ::sigdescr_np(how.value);
  if (name == nullptr || text == nullptr) return "killed by signal " + std::to_string(how.value);
  return std::string("killed by SIG") + name + " (" + text + ")";
}

std::string list_ranks(const std::vector<int>& ascending) {
  std::string text;
  for (size_t i = 0; i < ascending.size();) {
    size_t last = i;
    while (last + 1 < ascending.size() && ascending[last + 1] == ascending[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(ascending[i]);
    if (last > i) text += (last == i + 1 ? ", " : "-") + std::to_string(ascending[last]);
    i = last + 1;
  }
  return text;
}

std::string format(const FailureReport& report) {
  const RankEnd& culprit = *report.verdict.culprit;
  std::string text = "lockstep: rank " + std::to_string(culprit.rank) + " of " + std::to_string(report.world_size) +
                     " failed first: " + describe(culprit.how) + "\n";
  const auto line = [&](const char* what, const std::string& value) {
    text += "  " + std::string(what) + std::string(10 - std::strlen(what), ' ') + value + "\n";
  };
  line("process", std::to_string(culprit.pid) + ", " + short_seconds(culprit.seconds) + " s after its start");
  line("program", report.program);
  if (!report.verdict.also_suspect.empty())
    line("unsure", "rank " + list_ranks(report.verdict.also_suspect) +
                       " failed in the same instant; which of them was first is not known");
  if (!report.killed.empty())
    line("killed", "rank " + list_ranks(report.killed) + ", which did not stop when asked to");
  if (report.tail.empty()) {
    line("output", "none");
  } else {
    line("log", report.log_path.empty() ? "could not be written" : report.log_path);
    text += "  its last " + (report.tail.size() == 1 ? "line" : std::to_string(report.tail.size()) + " lines") + ":\n";
    for (const auto& tail_line : report.tail) text += "  | " + tail_line + "\n";
  }
  return text + "lockstep: ends with exit code " + std::to_string(report.verdict.exit_code) + "\n";
}

}  // namespace lockstep
