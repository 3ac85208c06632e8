#include "workers/serve.h"

#include <unistd.h>

#include <cstdio>

#include "workers/line_channel.h"

namespace lockstep::bench {

std::string argument(int argc, char** argv, const std::string& name) {
  for (int i = 1; i + 1 < argc; ++i)
    if (argv[i] == name) return argv[i + 1];
  return "";
}

int serve_commands(int argc, char** argv, int rank, const std::string& version,
                   const std::function<std::string(const std::string&)>& answer) {
  LineChannel channel = LineChannel::connect(argument(argc, argv, "--socket"));
  channel.send("hello " + std::to_string(rank) + ' ' + version);
  while (const auto command = channel.receive()) {
    if (*command == "quit") return 0;
    if (!channel.send(answer(*command))) break;
  }
  std::fprintf(stderr, "rank %d: the bench is gone\n", rank);
  _exit(1);
}

}  // namespace lockstep::bench
