// What a checkpoint costs: saving against writing and syncing the same bytes, and how long an asynchronous save stops
// training against one copy of the state.
//
//     build/bin/bench_checkpoint --folder runs/bench
//     build/bin/bench_checkpoint --memory --model mlp --ranks 2
//
// Older checkpoints are removed outside of what is timed, by the bench, as the yardstick's file is; what a removal
// takes is printed. Rounds are interleaved; medians and ratios of medians are printed. What was saved is loaded and
// compared first. The second one: memory_bench.h.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>

#include <ATen/ATen.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <lockstep/checkpointer.h>
#include <lockstep/context.h>
#include <lockstep/error.h>
#include <lockstep/program.h>

#include "memory_bench.h"

namespace {

namespace fs = std::filesystem;
namespace bench = lockstep::bench;

double seconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The parameters and the two moments of Adam are a state of this shape: many tensors of some megabytes.
lockstep::StateDict make_state(int64_t bytes, int tensors) {
  lockstep::StateDict state;
  for (int i = 0; i < tensors; ++i)
    state.insert("tensor" + std::to_string(i), at::rand({bytes / tensors / 4}, at::kFloat));
  return state;
}

/// The yardstick: the same bytes in pieces of a megabyte into a new file, and one fsync.
void write_and_sync(const lockstep::StateDict& state, const std::string& path) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) throw lockstep::Error("cannot write " + path);
  for (const auto& item : state) {
    const char* bytes = static_cast<const char*>(item.value().const_data_ptr());
    for (size_t done = 0; done < item.value().nbytes();) {
      const ssize_t count = ::write(file, bytes + done, std::min<size_t>(1 << 20, item.value().nbytes() - done));
      if (count < 0) throw lockstep::Error("cannot write " + path);
      done += static_cast<size_t>(count);
    }
  }
  if (::fsync(file) != 0 || ::close(file) != 0) throw lockstep::Error("cannot sync " + path);
}

struct Bench {
  const lockstep::Context& context;
  fs::path folder;
  lockstep::StateDict state;
  std::map<std::string, std::vector<double>> times;

  lockstep::Checkpointer checkpointer(const std::string& name, bool asynchronous) {
    return lockstep::Checkpointer((folder / name).string(), context.group(),
                                  {.keep_last = 1000, .asynchronous = asynchronous});
  }

  void add_state(lockstep::Checkpointer& to) {
    to.add("state", {.save = [this] { return lockstep::to_object(state); },
                     .load =
                         [this](const c10::IValue& loaded) {
                           if (lockstep::hash(lockstep::to_state_dict(loaded)) != lockstep::hash(state))
                             throw lockstep::Error("what was loaded is not what was saved");
                         }});
  }

  void run(int rounds) {
    lockstep::Checkpointer direct = checkpointer("direct", false), asynchronous = checkpointer("asynchronous", true);
    add_state(direct);
    add_state(asynchronous);
    lockstep::StateDict copy;
    for (const auto& item : state) copy.insert(item.key(), item.value().clone());
    int64_t step = 0;
    for (auto* each : {&direct, &asynchronous}) {
      each->save(++step);
      each->finish();
      if (!each->resume()) throw lockstep::Error("nothing was saved");
    }
    const std::string raw = (folder / "raw").string();
    for (int round = 0; round < rounds; ++round) {
      times["write and sync"].push_back(seconds([&] { write_and_sync(state, raw); }));
      times["save"].push_back(seconds([&] {
        direct.save(++step);
        direct.finish();
      }));
      times["copy"].push_back(seconds([&] {
        for (const auto& item : state) copy[item.key()].copy_(item.value());
      }));
      times["stop"].push_back(seconds([&] { asynchronous.save(++step); }));
      asynchronous.finish();
      times["remove"].push_back(seconds([&] { fs::remove(raw); }));
      for (const char* name : {"direct", "asynchronous"})
        for (const auto& entry : fs::directory_iterator(folder / name)) fs::remove(entry.path());
    }
  }

  double median(const std::string& name) {
    auto& values = times[name];
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }
};

struct Options {
  std::string folder = "runs/bench/checkpoint", json;
  int64_t megabytes = 400;
  int rounds = 0;
  bool tiny = false, memory = false;
  bench::MemoryBenchOptions in_memory;
};

std::string bench_disk(int argc, char** argv, const Options& options) {
  lockstep::Context context(argc, argv, {.seed = 1, .announce = false});
  const int rounds = options.tiny ? 2 : options.rounds > 0 ? options.rounds : 7;
  Bench bench{context, options.folder, make_state(options.megabytes << 20, 100), {}};
  bench.run(rounds);
  nlohmann::ordered_json figures = {{"megabytes", options.megabytes}, {"rounds", rounds}};
  std::printf("%ld MB of state, medians of %d rounds\n", options.megabytes, rounds);
  for (const char* name : {"write and sync", "save", "copy", "stop", "remove"}) {
    const double middle = bench.median(name);
    const auto& values = bench.times[name];
    std::printf("%-15s %8.1f ms  (%.1f to %.1f)\n", name, 1e3 * middle, 1e3 * values.front(), 1e3 * values.back());
    figures["seconds"][name] = values;
  }
  figures["save_over_write"] = bench.median("save") / bench.median("write and sync");
  figures["stop_over_copy"] = bench.median("stop") / bench.median("copy");
  std::printf("saving takes %.2f x the time of writing and syncing, an asynchronous save stops for %.2f x a copy\n",
              figures["save_over_write"].get<double>(), figures["stop_over_copy"].get<double>());
  for (const char* name : {"direct", "asynchronous", "raw"}) fs::remove_all(fs::path(options.folder) / name);
  return figures.dump(2);
}

std::string bench_in_memory(Options& options) {
  options.in_memory.folder = options.folder;
  if (options.rounds > 0) options.in_memory.rounds = options.rounds;
  if (options.tiny) options.in_memory.rounds = options.in_memory.steps = 2;
  std::string figures = bench::bench_memory(options.in_memory);
  if (!figures.empty()) fs::remove_all(fs::path(options.folder) / "memory");
  return figures;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(argc, argv, [&] {
    CLI::App app("What a checkpoint costs");
    Options options;
    app.add_option("--folder", options.folder, "Where to write")->capture_default_str();
    app.add_option("--megabytes", options.megabytes, "Of the state")->capture_default_str();
    app.add_option("--rounds", options.rounds, "Interleaved rounds (else 7, in memory 9)");
    app.add_option("--json", options.json, "File for the figures");
    app.add_flag("--tiny", options.tiny, "2 MB and 2 rounds, for tests");
    app.add_flag("--memory", options.memory,
                 "Save to the launcher's memory after every step of a model; with --ranks N");
    app.add_option("--model", options.in_memory.model, "With --memory: mlp, transformer, ...")->capture_default_str();
    app.add_flag("--sharded", options.in_memory.sharded, "With --memory: ZeroRedundancyOptimizer, shared parameters");
    app.footer(lockstep::kRanksHelp);
    CLI11_PARSE(app, argc, argv);
    if (options.tiny) options.megabytes = 2;
    fs::create_directories(options.folder);
    const std::string figures = options.memory ? bench_in_memory(options) : bench_disk(argc, argv, options);
    if (!options.json.empty() && !figures.empty()) std::ofstream(options.json) << figures << '\n';
    return 0;
  });
}
