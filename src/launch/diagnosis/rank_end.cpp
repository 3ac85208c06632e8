#include "launch/diagnosis/rank_end.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/text.h"

namespace lockstep {
namespace {

/// The program was found before; these are the other possible errors.
const char* start_hint(int error) {
  if (error == ENOEXEC) return " (neither a binary for this machine nor a script with a #! line)";
  if (error == ENOENT) return " (the interpreter it names is missing)";
  return "";
}

}  // namespace

const RankEnd* find_end(const std::vector<RankEnd>& ends, int rank) {
  const auto end = std::find_if(ends.begin(), ends.end(), [&](const RankEnd& e) { return e.rank == rank; });
  return end == ends.end() ? nullptr : &*end;
}

/// SIGABRT does not count: an uncaught exception ends in it, and that exception may be "connection closed".
bool was_killed(const RankEnd& end) {
  return end.how.kind == ProcessEnd::Kind::kLost ||
         (end.how.kind == ProcessEnd::Kind::kSignalled && end.how.value != SIGABRT);
}

bool ended_by_exception(const RankEnd& end, const RankStatus& account) {
  return account.uncaught && end.how.kind == ProcessEnd::Kind::kSignalled && end.how.value == SIGABRT;
}

std::string describe(const RankEnd& end, const RankStatus& account) {
  if (!end.lost.empty()) return describe(end.how) + ": " + printable(end.lost);
  if (!ended_by_exception(end, account)) return describe(end.how);
  const std::string& text = account.failure_text;
  return "threw: " + (text.empty() ? "an exception without a message" : printable_line(text));
}

std::string describe(const ProcessEnd& how) {
  switch (how.kind) {
    case ProcessEnd::Kind::kExited:
      return "exit code " + std::to_string(how.value);
    case ProcessEnd::Kind::kNotStarted:
      return std::string("could not be started: ") + std::strerror(how.value) + start_hint(how.value);
    case ProcessEnd::Kind::kLost:
      return "was lost with its machine";
    case ProcessEnd::Kind::kSignalled:
      break;
  }
  const char* name = ::sigabbrev_np(how.value);
  const char* text = ::sigdescr_np(how.value);
  if (name == nullptr || text == nullptr) return "killed by signal " + std::to_string(how.value);
  return std::string("killed by SIG") + name + " (" + text + ")";
}

}  // namespace lockstep
