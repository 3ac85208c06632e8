// libFuzzer: any words, one a line, as the command line of `lockstep run`, and as that of a program with --ranks.

#include <cstdlib>
#include <string>
#include <vector>

#include "launch/launch_error.h"
#include "launch/ranks_argument.h"
#include "run_options.h"

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const std::string text(reinterpret_cast<const char*>(data), size);
  std::vector<std::string> words;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    words.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  try {
    const RunRequest request = parse_run_command(words, 4);
    if (request.help.empty()) {
      const LaunchOptions& options = request.options;
      check(options.ranks >= 1 && options.max_restarts >= 0 && !options.command.empty());
      check(options.grace.count() >= 1 && options.hang_timeout.count() >= 1 && options.hang_timeout <= kNever);
      check(!options.elastic || options.elastic->contains(options.ranks));
      const int most = options.elastic ? options.elastic->max : options.ranks;
      for (const int rank : options.shown_ranks) check(rank >= 0 && (rank < most || request.hosts));
      // The program's words are untouched.
      check(std::equal(options.command.rbegin(), options.command.rend(), words.rbegin()));
    }
  } catch (const LaunchError& error) {
    check(error.exit_code == kExitBadCommandLine || error.exit_code == kExitRefusedPeer);  // there is no key
  }
  try {
    const auto asked = find_ranks_argument(words, 4);
    check(!asked || (asked->ranks >= 1 && asked->arguments.size() < words.size()));
  } catch (const LaunchError& error) {
    check(error.exit_code == kExitBadCommandLine);
  }
  return 0;
}
