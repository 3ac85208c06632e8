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
/// It takes `--ranks N` before `body` runs, as Context(argc, argv) does: a program that nobody has started as a rank
/// runs `body` in N new processes, and this one ends with the launcher's exit code. So `body` never sees --ranks, nor
/// the options that go with it, and nothing runs twice. In a rank --ranks is an Error.
///
/// Returns what `body` returns. An exception that leaves `body` is printed to stderr behind the program's name (a
/// c10::Error without its stack trace) and, unless `lockstep run` names it, before the page about it; 1 is returned.
int run_program(int argc, const char* const* argv, const std::function<int()>& body);

/// The description of --ranks, for the --help of a program.
inline constexpr const char* kRanksHelp =
    "Without a launcher:\n"
    "  --ranks N|auto              Start this program as N ranks, or as one per usable core\n"
    "  --hang-timeout S|off        With --ranks: end ranks that hang for S seconds (default: 300)\n"
    "  --grace S                   With --ranks: seconds between asking ranks to stop and killing them";

}  // namespace lockstep
