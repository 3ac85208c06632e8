// What a checkpoint costs: saving against writing and syncing the same bytes, and how long an asynchronous save stops
// training against one copy of the state.
//
//     build/bin/bench_checkpoint --folder runs/bench
//
// Older checkpoints are removed outside of what is timed, by the bench, as the yardstick's file is; what a removal
// takes is printed. Rounds are interleaved; medians and ratios of medians are printed. What was saved is loaded and
// compared first.

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

namespace {

namespace fs = std::filesystem;

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

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What a checkpoint costs");
  std::string folder = "runs/bench/checkpoint", json;
  int64_t megabytes = 400;
  int rounds = 7;
  bool tiny = false;
  app.add_option("--folder", folder, "Where to write")->capture_default_str();
  app.add_option("--megabytes", megabytes, "Of the state")->capture_default_str();
  app.add_option("--rounds", rounds, "Interleaved rounds")->capture_default_str();
  app.add_option("--json", json, "File for the figures");
  app.add_flag("--tiny", tiny, "2 MB and 2 rounds, for tests");
  CLI11_PARSE(app, argc, argv);
  if (tiny) {
    megabytes = 2;
    rounds = 2;
  }
  try {
    lockstep::Context context(argc, argv, {.seed = 1, .announce = false});
    fs::create_directories(folder);
    Bench bench{context, folder, make_state(megabytes << 20, 100), {}};
    bench.run(rounds);
    nlohmann::ordered_json figures = {{"megabytes", megabytes}, {"rounds", rounds}};
    std::printf("%ld MB of state, medians of %d rounds\n", megabytes, rounds);
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
    if (!json.empty()) std::ofstream(json) << figures.dump(2) << '\n';
    for (const char* name : {"direct", "asynchronous", "raw"}) fs::remove_all(fs::path(folder) / name);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_checkpoint: %s\n", error.what());
    return 1;
  }
}
