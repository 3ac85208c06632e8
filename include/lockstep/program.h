#pragma once

#include <lockstep/cxx20.h>

#include <functional>

namespace lockstep {

/// The body of a program's main(), for programs that parse arguments before they construct their Context:
///
///     int main(int argc, char** argv) {
///       return lockstep::run_program(argc, argv, [&] {
///         const Options options = parse(argc, argv);
///         const lockstep::Context context({.seed = options.seed});
///         train(options, context);
///         return 0;
///       });
///     }
///
/// It handles `--ranks N` before `body` runs, as Context(argc, argv) does: a program that was not started as a rank
/// runs `body` in N new processes, and this one ends with the launcher's exit code. So `body` never sees --ranks or its
/// related options, and nothing runs twice. In a rank --ranks is an Error.
///
/// Returns the result of `body`, or 1 instead of 0 if a rank left a group with an operation for which it never waited,
/// and which failed (Work). If an exception leaves `body`, its text is printed to stderr after the program's name
/// (a c10::Error without its stack trace), followed by the page about the error, unless `lockstep run` names that page.
/// run_program() then returns 1.
int run_program(int argc, const char* const* argv, const std::function<int()>& body);

/// The description of --ranks, for a program's --help.
inline constexpr const char* kRanksHelp =
    "Without a launcher:\n"
    "  --ranks N|auto              Start this program as N ranks, or as one per usable core\n"
    "  --hang-timeout S|off        With --ranks: end ranks that hang for S seconds (default: 300)\n"
    "  --grace S                   With --ranks: seconds between asking ranks to stop and killing them";

}  // namespace lockstep
