// A training step on many machines, simulated with SimGrid: one line for each combination of machines and algorithm.
//
//     simulate_step FILE
//
// FILE holds one line "key value..." each; scale.py writes it and says where its values come from:
//
//     link BYTES_PER_SECOND LATENCY     of each machine, in both directions
//     core SHARE                        of what all links carry together; from 1 on, a switch that blocks nothing
//     cost MEETING MESSAGE BYTE         seconds: an all-reduce's ranks to meet, a message to send, a byte to add
//     jitter SHARE                      how unlike the machines' steps are: standard deviation over the mean
//     steps COUNT
//     forward SECONDS
//     bucket SECONDS BYTES              backward until it is full, and what it holds; as many as there are
//     diloco SYNC_EVERY OVERLAP BYTES   for the algorithm of that name: steps between rounds, steps that a round may
//     take
//                                       before a machine waits for it, and what all ranks of a machine exchange
//     run MACHINES RANKS ALGORITHM      ranks of each machine; lockstep, direct, ring, halving_doubling, tree or diloco
//
// For each run it prints MACHINES ALGORITHM and the mean seconds of a step.
//
// A machine is one host with two actors: one computes forward and the buckets' backward, the other all-reduces full
// buckets in order. Its ranks work side by side, each on a slice, and share the link: a message of the simulation
// stands for the messages of all of them, so that it costs one MESSAGE. Where a ring takes more than kRounds rounds,
// neighbouring rounds are merged: bytes, latencies and messages are added up.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <simgrid/s4u.hpp>

#include "collectives/hierarchical/halving_plan.h"

namespace {

namespace s4u = simgrid::s4u;

constexpr int kRounds = 16;
/// Messages to as many machines are on their way at once.
constexpr int kFlights = 8;

struct Bucket {
  double seconds, bytes;
};
struct Run {
  int machines, ranks;
  std::string algorithm;
};
struct Work {
  double bandwidth = 0, latency = 0, core = 1;
  double meeting = 0, message = 0, byte = 0;
  double jitter = 0, forward = 0;
  int steps = 1;
  int sync_every = 1, overlap = 0;
  double exchanged = 0;
  std::vector<Bucket> buckets;
  std::vector<Run> runs;
};

Work read_work(const char* path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  Work work;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    words >> key;
    if (key == "link")
      words >> work.bandwidth >> work.latency;
    else if (key == "core")
      words >> work.core;
    else if (key == "cost")
      words >> work.meeting >> work.message >> work.byte;
    else if (key == "jitter")
      words >> work.jitter;
    else if (key == "steps")
      words >> work.steps;
    else if (key == "forward")
      words >> work.forward;
    else if (key == "bucket")
      words >> work.buckets.emplace_back().seconds >> work.buckets.back().bytes;
    else if (key == "diloco")
      words >> work.sync_every >> work.overlap >> work.exchanged;
    else if (key == "run") {
      auto& run = work.runs.emplace_back();
      words >> run.machines >> run.ranks >> run.algorithm;
    } else
      throw std::runtime_error("unknown key in line: " + line);
    if (words.fail()) throw std::runtime_error("too few values in line: " + line);
  }
  return work;
}

/// One machine's part in an all-reduce between machines.
class Machine {
 public:
  Machine(const Work& work, const Run& run, int index) : work_(work), run_(run), index_(index) {}

  void all_reduce(double bytes) {
    s4u::this_actor::sleep_for(work_.meeting + work_.byte * bytes);
    if (run_.machines == 1) return;
    if (run_.algorithm == "lockstep")
      is_halved(bytes) ? halving_doubling(bytes) : direct(bytes);
    else if (run_.algorithm == "direct")
      direct(bytes);
    else if (run_.algorithm == "ring")
      ring(bytes);
    else if (run_.algorithm == "halving_doubling")
      halving_doubling(bytes);
    else if (run_.algorithm == "tree")
      tree(bytes);
    else
      throw std::runtime_error("unknown algorithm " + run_.algorithm);
  }

  /// Pseudo-gradients of a round (src/diloco/exchange.cpp): each machine adds up a part, and sends the mean to all.
  void exchange_round(double bytes) {
    if (run_.machines == 1) return;
    if (run_.machines == 2) return rounds_with_all(bytes);
    rounds_with_all(bytes / run_.machines);
    rounds_with_all(bytes / run_.machines);
  }

 private:
  bool is_halved(double bytes) const {
    return lockstep::hierarchical_engine::halving_is_faster(
        {.bytes = static_cast<size_t>(bytes), .machines = run_.machines, .rails = run_.ranks});
  }
  /// Sends and receives at once; `messages` is how many messages follow each other in it.
  void exchange(int to, int from, double bytes, int messages) {
    s4u::this_actor::sleep_for(messages * work_.message + (messages - 1) * work_.latency);
    auto sent = box(index_, to)->put_async(&token_, static_cast<uint64_t>(std::max(1.0, bytes)));
    void* got = nullptr;
    auto received = box(from, index_)->get_async<void>(&got);
    sent->wait();
    received->wait();
  }
  void send(int to, double bytes) {
    s4u::this_actor::sleep_for(work_.message);
    box(index_, to)->put(&token_, static_cast<uint64_t>(std::max(1.0, bytes)));
  }
  void receive(int from) { box(from, index_)->get<void>(); }

  /// Sends `bytes` to each other machine, and receives as many from each.
  void rounds_with_all(double bytes) {
    const int others = run_.machines - 1, merged = std::min((others + kFlights - 1) / kFlights, kRounds);
    for (int i = 0; i < merged; ++i) {
      const int first = 1 + others * i / merged, last = 1 + others * (i + 1) / merged;
      // On their way at the same time: the messages' costs add up, their latencies do not.
      s4u::this_actor::sleep_for((last - first - 1) * work_.message);
      exchange((index_ + first) % run_.machines, (index_ - first + run_.machines) % run_.machines,
               bytes * (last - first), 1);
    }
  }
  /// What Lockstep does up to 16 machines (docs/several_machines.md): small messages as a whole to all; larger ones in
  /// parts, each added by its home machine.
  void direct(double bytes) {
    constexpr double kAtOnce = 32 << 10;
    if (bytes <= kAtOnce || run_.machines == 2) return rounds_with_all(bytes);
    rounds_with_all(bytes / run_.machines);
    rounds_with_all(bytes / run_.machines);
  }
  void ring(double bytes) {
    const int all = 2 * (run_.machines - 1), merged = std::min(all, kRounds);
    for (int i = 0; i < merged; ++i) {
      const int count = all * (i + 1) / merged - all * i / merged;
      exchange((index_ + 1) % run_.machines, (index_ - 1 + run_.machines) % run_.machines,
               bytes / run_.machines * count, count);
    }
  }
  void halving_doubling(double bytes) {
    double part = bytes;
    int distance = 1;
    for (; distance < run_.machines; distance *= 2) exchange(index_ ^ distance, index_ ^ distance, part /= 2, 1);
    for (; distance > 1; part *= 2) {
      distance /= 2;
      exchange(index_ ^ distance, index_ ^ distance, part, 1);
    }
  }
  void tree(double bytes) {
    for (int distance = 1; distance < run_.machines; distance *= 2) {
      if ((index_ & distance) != 0) {
        send(index_ - distance, bytes);
        receive(index_ - distance);
        return pass_on(distance, bytes);
      }
      if (index_ + distance < run_.machines) receive(index_ + distance);
    }
    pass_on(run_.machines, bytes);
  }
  void pass_on(int below, double bytes) {
    int distance = 1;
    while (distance < below) distance *= 2;
    for (distance /= 2; distance >= 1; distance /= 2)
      if (index_ + distance < run_.machines) send(index_ + distance, bytes);
  }

  s4u::Mailbox* box(int from, int to) const {
    return s4u::Mailbox::by_name(std::to_string(from) + ">" + std::to_string(to));
  }

  const Work& work_;
  const Run& run_;
  const int index_;
  char token_ = 0;
};

void build_network(const Work& work, const Run& run) {
  auto* zone = s4u::create_star_zone("machines");
  auto* core = work.core < 1 ? zone->create_link("core", work.bandwidth * work.core * run.machines)->seal() : nullptr;
  for (int i = 0; i < run.machines; ++i) {
    const std::string name = std::to_string(i);
    auto* host = zone->create_host("machine" + name, 1e9)->seal();
    auto* link = zone->create_split_duplex_link("link" + name, work.bandwidth)->set_latency(work.latency / 2)->seal();
    std::vector<s4u::LinkInRoute> route{{link, s4u::LinkInRoute::Direction::UP}};
    if (core) route.emplace_back(core);
    zone->add_route(host->get_netpoint(), nullptr, nullptr, nullptr, route, true);
  }
  zone->seal();
}

/// Steps with a round every sync_every; the simulated machine waits for its result `overlap` steps later.
void start_diloco(const Work& work, const Run& run, int i, double& ended) {
  auto* host = s4u::Host::by_name("machine" + std::to_string(i));
  auto due = s4u::Semaphore::create(0), done = s4u::Semaphore::create(0);
  s4u::Actor::create("compute", host, [&work, due, done, i, &ended] {
    std::mt19937_64 random(static_cast<uint64_t>(i) + 1);
    std::normal_distribution<double> pace(1, work.jitter);
    double seconds = work.forward;
    for (const Bucket& bucket : work.buckets) seconds += bucket.seconds;
    for (int step = 1, awaited = 0; step <= work.steps; ++step) {
      s4u::this_actor::sleep_for(seconds * std::max(0.5, work.jitter > 0 ? pace(random) : 1.0));
      if (step % work.sync_every == 0) due->release(), awaited = step + work.overlap;
      if (step == awaited) done->acquire(), awaited = 0;
    }
    ended = std::max(ended, s4u::Engine::get_clock());
  });
  s4u::Actor::create("communicate", host, [&work, &run, due, done, i] {
    Machine machine(work, run, i);
    for (int round = 0; round < work.steps / work.sync_every; ++round) {
      due->acquire();
      machine.exchange_round(work.exchanged);
      done->release();
    }
  });
}

/// Mean seconds of a step.
double simulate(const Work& work, const Run& run, s4u::Engine& engine) {
  build_network(work, run);
  double ended = 0;
  if (run.algorithm == "diloco") {
    for (int i = 0; i < run.machines; ++i) start_diloco(work, run, i, ended);
    engine.run();
    return ended / work.steps;
  }
  for (int i = 0; i < run.machines; ++i) {
    auto* host = s4u::Host::by_name("machine" + std::to_string(i));
    auto full = s4u::Semaphore::create(0), reduced = s4u::Semaphore::create(0);
    s4u::Actor::create("compute", host, [&work, full, reduced, i, &ended] {
      std::mt19937_64 random(static_cast<uint64_t>(i) + 1);
      std::normal_distribution<double> pace(1, work.jitter);
      for (int step = 0; step < work.steps; ++step) {
        const double slow = std::max(0.5, work.jitter > 0 ? pace(random) : 1.0);
        s4u::this_actor::sleep_for(work.forward * slow);
        for (const Bucket& bucket : work.buckets) {
          s4u::this_actor::sleep_for(bucket.seconds * slow);
          full->release();
        }
        reduced->acquire();
      }
      ended = std::max(ended, s4u::Engine::get_clock());
    });
    s4u::Actor::create("communicate", host, [&work, &run, full, reduced, i] {
      Machine machine(work, run, i);
      for (int step = 0; step < work.steps; ++step) {
        for (const Bucket& bucket : work.buckets) {
          full->acquire();
          machine.all_reduce(bucket.bytes);
        }
        reduced->release();
      }
    });
  }
  engine.run();
  return ended / work.steps;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: simulate_step FILE\n";
    return 2;
  }
  try {
    const Work work = read_work(argv[1]);
    // A process of its own for each run: SimGrid simulates one platform in its life.
    for (const Run& run : work.runs) {
      const pid_t child = fork();
      if (child < 0) throw std::runtime_error("cannot fork");
      if (child == 0) {
        int count = 1;
        s4u::Engine engine(&count, argv);
        // Bytes over bandwidth plus latency, as in the model that was fitted; both directions of a link at full speed.
        s4u::Engine::set_config("network/model:CM02");
        s4u::Engine::set_config("network/crosstraffic:0");
        s4u::Engine::set_config("network/TCP-gamma:0");
        s4u::Engine::set_config("contexts/stack-size:64");
        std::printf("%d %s %.9f\n", run.machines, run.algorithm.c_str(), simulate(work, run, engine));
        std::fflush(stdout);
        _exit(0);
      }
      int status = 0;
      if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
        throw std::runtime_error("the simulation of " + std::to_string(run.machines) + " machines has failed");
    }
  } catch (const std::exception& error) {
    std::cerr << "simulate_step: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
