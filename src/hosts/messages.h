#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hosts/link_plan.h"

namespace lockstep::hosts {

/// Incremented with every change of the messages below; both sides must have the same.
constexpr int kProtocol = 8;

constexpr size_t kMaxHelloBytes = 64 << 10;  ///< a frame's, before the agent has been welcomed
constexpr size_t kMaxFrameBytes = 8 << 20;
constexpr size_t kMaxStoreBytes = 64 << 10;  ///< of one Store message

enum class Kind : uint8_t {
  // Sent by an agent.
  kHello,     ///< Hello, the first message
  kReady,     ///< Ready, after Prepare
  kFailed,    ///< Failed: it cannot carry out an order
  kStarted,   ///< Started
  kOutput,    ///< Output
  kPages,     ///< Pages
  kSeen,      ///< Seen
  kEnded,     ///< Ended
  kFinished,  ///< nothing: all output of the ranks has been sent, and none of their processes is left
  kSignal,    ///< Number: a signal to the agent
  kKept,      ///< Kept, in answer to Keep
  kLinkNews,  ///< News of encrypted links
  // Sent by the coordinator.
  kPrepare,  ///< Prepare
  kStart,    ///< Start
  kTaken,    ///< Number: bytes of output by which more may be sent
  kStop,     ///< Number: a signal for all ranks that run
  kKill,     ///< nothing
  kAsk,      ///< nothing: the ranks are asked to leave
  kLook,     ///< Look: requests a Seen with these facts
  kFinish,   ///< nothing
  kKeep,     ///< Keep: the run gives up; write the state in this machine's memory
  kOver,     ///< Over: the run has ended, or the agent is refused
  // Sent by both.
  kStore,  ///< Store
  kBeat,   ///< nothing
};

struct Number {
  int64_t value = 0;
  void fields(auto& wire) { wire(value); }
};

struct Hello {
  int protocol = kProtocol;
  std::string version;  ///< of Lockstep
  int node = 0;
  int nodes = 0;  ///< 0: the coordinator knows
  int slots = 0;  ///< ranks; 0: the coordinator knows
  std::string host;
  std::string command;   ///< the program and its arguments; empty: the coordinator knows
  bool encrypt = false;  ///< refuses a run without
  bool joins = false;    ///< a run of --islands that has not started it; `host` is its name there
  int turn = -1;         ///< Prepare's, of an agent of --islands that connects again
  void fields(auto& wire) {
    wire(protocol), wire(version), wire(node), wire(nodes), wire(slots), wire(host), wire(command), wire(encrypt);
    wire(joins), wire(turn);
  }
};

/// Settings common to the ranks of all starts.
struct Prepare {
  std::vector<std::string> command;
  std::vector<std::string> environment;  ///< empty: the agent's own
  std::string folder;                    ///< to run in; empty: the agent's own
  std::string address;                   ///< for its ranks; empty: its route's to the coordinator
  std::string run_dir;
  bool keep_run_dir = false;
  int slots = 1;
  int bind = 0;
  int max_restarts = 0;
  std::string run_id;
  bool encrypt = false;
  int link_port = 0;  ///< 0: any
  int island = -1;    ///< of a run of --islands: the machine's number
  int turn = 0;       ///< changes when another agent gets the place
  void fields(auto& wire) {
    wire(command), wire(environment), wire(folder), wire(address), wire(run_dir), wire(keep_run_dir), wire(slots);
    wire(bind), wire(max_restarts), wire(run_id), wire(encrypt), wire(link_port), wire(island), wire(turn);
  }
};

struct Ready {
  std::string address;  ///< for the ranks of the other machines
  int master_port = 0;
  std::string program_hash;
  std::string processor;
  std::vector<std::string> warnings;
  std::string network;  ///< differs where loopback addresses are others
  int link_port = 0;    ///< of encrypted links; 0: none
  void fields(auto& wire) {
    wire(address), wire(master_port), wire(program_hash), wire(processor), wire(warnings), wire(network);
    wire(link_port);
  }
};

struct News {
  std::string text;
  bool is_failure = false;  ///< the machine cannot take part: what it could not do
  void fields(auto& wire) { wire(text), wire(is_failure); }
};

struct Failed {
  int exit_code = 0;
  std::string text;
  void fields(auto& wire) { wire(exit_code), wire(text); }
};
using Over = Failed;

struct Start {
  int slots = 1;  ///< ranks here
  int first_rank = 0;
  int world_size = 1;
  int node = 0;  ///< this machine's number among those with ranks
  int nodes = 1;
  int restarts = 0;
  std::string master_address;
  int master_port = 0;
  int terminal_rank = -1;  ///< whose output ends on a terminal; -1: none
  int terminal_columns = 0;
  std::string address;  ///< for the ranks here; empty: the machine's
  LinkPlan links;       ///< no machines: none
  void fields(auto& wire) {
    wire(slots), wire(first_rank), wire(world_size), wire(node), wire(nodes), wire(restarts), wire(master_address),
        wire(master_port);
    wire(terminal_rank), wire(terminal_columns), wire(address), wire(links);
  }
};

struct Keep {
  std::string other_folder;
  bool is_sound = true;
  void fields(auto& wire) { wire(other_folder), wire(is_sound); }
};

/// A KeptState.
struct Kept {
  int64_t step = -1, path_step = 0;
  std::string path, problem;
  bool written = false;
  void fields(auto& wire) { wire(step), wire(path_step), wire(path), wire(problem), wire(written); }
};

struct Started {
  std::vector<int> pids;
  void fields(auto& wire) { wire(pids); }
};

struct Output {
  int rank = 0;
  int stream = 0;
  std::string bytes;
  void fields(auto& wire) { wire(rank), wire(stream), wire(bytes); }
};

struct Store {
  int rank = 0;
  std::string bytes;  ///< empty: the connection has ended
  void fields(auto& wire) { wire(rank), wire(bytes); }
};

struct Page {
  int rank = 0;
  std::string bytes;
  void fields(auto& wire) { wire(rank), wire(bytes); }
};

struct Pages {
  int64_t now_ns = 0;  ///< on the agent's clock, like the times on the pages
  std::vector<Page> pages;
  void fields(auto& wire) { wire(now_ns), wire(pages); }
};

struct RankSeen {
  bool outlived = false;
  int process_state = 0;
  int64_t processor_ns = -1;  ///< -1: not sampled, or not visible
  void fields(auto& wire) { wire(outlived), wire(process_state), wire(processor_ns); }
};

struct Look {
  bool process_states = false;
  bool processor_times = false;
  void fields(auto& wire) { wire(process_states), wire(processor_times); }
};

struct Seen {
  Look look;
  bool stop_asked = false;
  int64_t stop_at = 0;
  std::vector<RankSeen> ranks;
  void fields(auto& wire) { wire(look), wire(stop_asked), wire(stop_at), wire(ranks); }
};

struct Ended {
  int rank = 0;
  int how = 0;  ///< ProcessEnd::Kind
  int value = 0;
  double seconds = 0;
  int64_t peak_bytes = 0;
  std::string error_text;
  int64_t memory_kills = 0;
  std::string counted_in;
  int64_t memory_limit = -1;  ///< -1: none
  void fields(auto& wire) {
    wire(rank), wire(how), wire(value), wire(seconds), wire(peak_bytes), wire(error_text), wire(memory_kills);
    wire(counted_in), wire(memory_limit);
  }
};

}  // namespace lockstep::hosts
