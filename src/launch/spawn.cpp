#include <lockstep/spawn.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <map>
#include <optional>

#include "base/environment.h"
#include "base/error.h"
#include "base/file_descriptor.h"
#include "launch/launch_error.h"
#include "launch/launcher.h"
#include "launch/process/own_program.h"
#include "rank_page/rank_board.h"
#include "rendezvous/world.h"

namespace lockstep {
namespace {

constexpr const char* kCallVariable = "LOCKSTEP_SPAWN";

std::map<std::string, int> calls;  // of spawn() in this process by their place; one thread at a time
bool in_a_rank = false;            // the function of this process's call runs

/// Identifies this call among all calls of the process, also in its ranks.
std::string next_call(const std::source_location& where) {
  const std::string place =
      std::to_string(where.line()) + ":" + std::to_string(where.column()) + ":" + where.file_name();
  return std::to_string(++calls[place]) + ":" + place;
}

/// A byte for each rank that has run the function, in memory that the ranks inherit.
class Attendance {
 public:
  Attendance() : file_(::memfd_create("lockstep-spawn", 0)) {
    if (!file_) throw_errno("making memory for the ranks of lockstep::spawn");
  }
  int fd() const { return file_.get(); }
  bool has(int rank) const {
    char byte = 0;
    return ::pread(file_.get(), &byte, 1, rank) == 1 && byte != 0;
  }

 private:
  FileDescriptor file_;
};

/// A rank's part of the call; the rank ends here.
[[noreturn]] void be_a_rank(const std::function<void(int)>& function, int rank, int attendance) {
  in_a_rank = true;
  ::fcntl(attendance, F_SETFD, FD_CLOEXEC);
  std::optional<std::string> failure;
  try {
    function(rank);
  } catch (const std::exception& error) {
    failure = error.what();
  } catch (...) {
    failure = "something other than a std::exception";
  }
  // The first cause stays, such as one recorded by a collective; a Context that the exception passed had no text for
  // it.
  if (failure) own_page().fail_by_exception(*failure, /*uncaught=*/false);
  if (!failure && ::pwrite(attendance, "x", 1, rank) != 1) failure = "";
  std::exit(failure ? 1 : 0);
}

/// The descriptor of the attendance if this process is a rank of this call; empty in the process that must start the
/// ranks; -1 in a rank of another call. Throws Error in a rank of another launcher.
std::optional<int> attendance_of(const std::string& call, const Environment& environment, const World& world) {
  if (!environment.lockstep_spawn) {
    if (world.source == World::Source::kAlone) return std::nullopt;
    throw Error(std::string("lockstep::spawn starts ranks, but this process is already one, of ") +
                name_of(world.source) + "; start the program alone, or call the function itself");
  }
  if (in_a_rank) throw Error("lockstep::spawn was called inside a function that lockstep::spawn runs; call it outside");
  const std::string& told = *environment.lockstep_spawn;  // "<descriptor> <call>"
  const size_t space = told.find(' ');
  return space != std::string::npos && told.substr(space + 1) == call ? std::atoi(told.c_str()) : -1;
}

std::chrono::milliseconds at_most_never(const char* name, std::chrono::milliseconds time) {
  if (time <= std::chrono::milliseconds(0))
    throw Error(std::string("SpawnOptions::") + name + " is " + std::to_string(time.count()) +
                " ms; it must be above 0");
  return std::min(time, kNever);
}

LaunchOptions options_for(int ranks, const SpawnOptions& options) {
  LaunchOptions launched;
  launched.ranks = parse_rank_count("lockstep::spawn", std::to_string(ranks), 1);
  launched.program = own_program();
  launched.command = own_arguments();
  launched.in_process = true;
  launched.hang_timeout = at_most_never("hang_timeout", options.hang_timeout);
  launched.grace = at_most_never("grace", options.grace);
  if (options.same_arguments) return launched;
  launched.command.resize(1);
  launched.command.insert(launched.command.end(), options.arguments.begin(), options.arguments.end());
  return launched;
}

}  // namespace

void spawn(int ranks, const std::function<void(int)>& function, const SpawnOptions& options,
           const std::source_location& where) {
  const Environment environment = Environment::from_process();
  const World world = discover_world(environment);
  const std::string call = next_call(where);
  if (const auto attendance = attendance_of(call, environment, world)) {
    if (*attendance >= 0) be_a_rank(function, world.rank, *attendance);
    return;
  }
  LaunchOptions launched = options_for(ranks, options);
  RunFailure failure;
  launched.on_failure = [&](const RunFailure& told) { failure = told; };
  const Attendance attendance;
  std::cout.flush();
  const std::string told = std::to_string(attendance.fd()) + " " + call;
  const int code = launch(launched, with_variables(own_environment(), {kCallVariable + ("=" + told)}));
  if (code > 128) ::raise(code - 128);
  const auto name = [&](int rank) { return "rank " + std::to_string(rank) + " of " + std::to_string(ranks); };
  if (code != kExitOk) {
    const std::string who = failure.rank < 0 ? "the ranks of lockstep::spawn" : name(failure.rank);
    throw RankError(who + " failed: " + failure.what, failure.rank, code);
  }
  for (int rank = 0; rank < ranks; ++rank)
    if (!attendance.has(rank))
      throw RankError(name(rank) +
                          " ended before it reached this call of lockstep::spawn; make sure that its arguments " +
                          "and its environment lead it there",
                      rank, kExitRankFailed);
}

}  // namespace lockstep
