#pragma once

#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>

#include <array>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "hosts/addresses.h"
#include "hosts/key.h"
#include "launch/launched.h"
#include "support/temporary_folder.h"

namespace lockstep::hosts {

using lockstep::contains;
using lockstep::eventually;
using lockstep::Launched;

inline const std::string kPageRank = LOCKSTEP_BIN_DIR "/page_rank";

/// The options of a run on several machines that are all this one: `hosts` as in "a:2,b:1".
inline std::vector<std::string> on(const std::string& hosts, std::vector<std::string> rest) {
  std::vector<std::string> words = {"--hosts",   hosts, "--launch-command", "env LOCKSTEP_MACHINE={host}",
                                    "--run-dir", "run"};
  words.insert(words.end(), rest.begin(), rest.end());
  return words;
}

/// The agents among a run's processes, by the numbers of their nodes.
inline std::vector<pid_t> agents_of(const Launched& run) {
  std::vector<pid_t> agents;
  for (const pid_t pid : run.processes()) {
    const std::string words = read_file("/proc/" + std::to_string(pid) + "/cmdline");
    const std::string mark = std::string("--node") + '\0';
    const size_t at = words.find(mark);
    if (at == std::string::npos || words.find(std::string("agent") + '\0') == std::string::npos) continue;
    const auto node = static_cast<size_t>(std::stoi(words.substr(at + mark.size())));
    if (agents.size() <= node) agents.resize(node + 1);
    if (agents[node] == 0) agents[node] = pid;  // its guard, which it forks, has the same words
  }
  return agents;
}

inline bool nothing_left(const Launched& run) {
  return eventually([&] { return run.processes().empty(); }, std::chrono::milliseconds(2000));
}

/// Whether both ranks of a run come to write `text`.
inline bool all_say(const Launched& run, const std::string& text) {
  return eventually([&] { return contains(run.log(0), text) && contains(run.log(1), text); });
}

/// How often `part` is in `text`.
inline int counted(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++count;
  return count;
}

/// What a command line prints.
inline std::string output_of(const std::string& line) {
  FILE* pipe = ::popen(line.c_str(), "r");
  std::string text;
  std::array<char, 4096> piece{};
  for (size_t count; (count = ::fread(piece.data(), 1, piece.size(), pipe)) > 0;) text.append(piece.data(), count);
  ::pclose(pipe);
  return text;
}

/// What a command of `lockstep` about a run prints.
inline std::string ask(const std::string& command, const Launched& run) {
  return output_of(LOCKSTEP_BIN_DIR "/lockstep " + command + " " + (run.folder() / "run").string() + " 2>&1");
}

/// A rendezvous for machines that are started one by one: a port that is free now, and a key file.
struct Rendezvous {
  TemporaryFolder folder;
  std::string place = listen_on("127.0.0.1", 0).endpoint.text();
  std::string key_file = folder.path() / "key";

  Rendezvous() {
    std::ofstream(key_file) << Key::generate().text() << "\n";
    ::chmod(key_file.c_str(), 0600);
  }
  /// The options of machine `node` of `nodes`.
  std::vector<std::string> options(int nodes, int node, std::vector<std::string> rest) const {
    std::vector<std::string> words = {
        "--nnodes", std::to_string(nodes), "--node-rank", std::to_string(node), "--rendezvous",
        place,      "--key-file",          key_file,      "--run-dir",          "run"};
    words.insert(words.end(), rest.begin(), rest.end());
    return words;
  }
};

}  // namespace lockstep::hosts
