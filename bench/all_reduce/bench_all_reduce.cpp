// All-reduce and its relatives on one machine, Lockstep's backends beside Gloo and every MPI that is installed:
//
//     bench/all_reduce/peers.sh                                        # once
//     build/bin/bench_all_reduce --ranks 2 --json all_reduce.json
//     python3 bench/all_reduce/report.py all_reduce.json
//     python3 bench/all_reduce/plot.py all_reduce.json all_reduce.svg
//
// This process measures nothing but the triad: it starts each system's workers once (workers/job.h) and lets them take
// turns (contest.h). Times are taken in the workers (worker.h), by the same code for all.

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "contest.h"
#include "workers/machine.h"

namespace {

namespace bench = lockstep::bench;

struct Options {
  int ranks = 2;
  int rounds = 10;
  double slice_ms = 10;
  std::string json;
  bool tiny = false;
  std::vector<size_t> bytes;
  std::vector<std::string> operations{bench::kOperations.begin(), bench::kOperations.end()};
  std::vector<std::string> dtypes{bench::kDtypes.begin(), bench::kDtypes.end()};
  std::vector<std::string> systems{std::begin(bench::kSystems), std::end(bench::kSystems)};
};

const nlohmann::ordered_json kDefinitions = {
    {"bytes", "of the whole buffer: all_gather's output, reduce_scatter's input"},
    {"placement",
     "private: pages of the process itself; resident: memory handed out by the system, which it reduces in place"},
    {"median_us",
     "over all samples of all rounds; a sample is the slowest rank's, after a barrier; operations of less than "
     "20 us are timed in batches of that length, back to back, and a sample is the batch's mean"},
    {"triad_gb_per_s",
     "a = b + s * c on as many processes as ranks, 24 bytes an item, plain or streaming stores, the better; best of "
     "all rounds"},
    {"data",
     "fp32 all_reduce and broadcast in place; all_gather and reduce_scatter out of place; sums; broadcast from rank "
     "0"}};

std::vector<bench::Case> make_cases(const Options& options) {
  std::vector<size_t> sizes = options.bytes;
  if (sizes.empty() && options.tiny) sizes = {4, 4096, size_t{1} << 20};
  if (sizes.empty()) {
    for (size_t size = 4; size <= (size_t{256} << 20); size *= 4) sizes.push_back(size);
    sizes.push_back(size_t{25} << 20);
    std::ranges::sort(sizes);
  }
  std::vector<bench::Case> cases;
  for (const std::string& operation : options.operations)
    for (const std::string& dtype : options.dtypes)
      for (const size_t size : sizes)
        for (const bench::Placement placement : {bench::Placement::kResident, bench::Placement::kPrivate}) {
          const bench::Case made{*bench::value_of<bench::Operation>(bench::kOperations, operation),
                                 *bench::value_of<bench::Dtype>(bench::kDtypes, dtype), placement, size};
          if (made.items(options.ranks) > 0) cases.push_back(made);
        }
  return cases;
}

void run(const Options& options) {
  bench::ContestOptions contest_options{
      .ranks = options.ranks, .rounds = options.rounds, .slice_ms = options.slice_ms, .cases = make_cases(options)};
  if (options.tiny) contest_options.rounds = 1, contest_options.slice_ms = 1, contest_options.triad_bytes = 4 << 20;
  std::vector<bench::System> systems;
  for (const std::string& name : options.systems)
    systems.push_back(bench::make_system(name, bench::build_folder(), options.ranks, bench::usable_cores()));

  nlohmann::ordered_json json = {{"host", bench::host_facts()},
                                 {"ranks", options.ranks},
                                 {"slice_ms", contest_options.slice_ms},
                                 {"definitions", kDefinitions}};
  const bench::ScratchFolder scratch("bench_all_reduce");
  bench::Contest contest(std::move(systems), contest_options, scratch.path());
  contest.run(bench::check_interrupts, [&] {
    json.update(contest.result());  // after every round, so that a run may be cut short
    std::ofstream file(options.json);
    file << json.dump(1) << '\n';
    if (!file.flush()) throw std::runtime_error("cannot write " + options.json);
  });
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"Measures collectives on one machine, all systems in interleaved rounds, results checked first."};
  const auto names = [](const auto& list) {
    return CLI::IsMember(std::vector<std::string>(std::begin(list), std::end(list)));
  };
  app.add_option("--ranks", options.ranks)->capture_default_str()->check(CLI::Range(2, 64));
  app.add_option("--json", options.json, "File for the figures")->required();
  app.add_option("--rounds", options.rounds)->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_option("--slice-ms", options.slice_ms, "Time of one system on one case in one round")->capture_default_str();
  app.add_option("--bytes", options.bytes, "Sizes (default: powers of 4 to 256 MiB, and 25 MiB)")->delimiter(',');
  app.add_option("--operations", options.operations)
      ->delimiter(',')
      ->check(names(bench::kOperations))
      ->capture_default_str();
  app.add_option("--dtypes", options.dtypes)->delimiter(',')->check(names(bench::kDtypes))->capture_default_str();
  app.add_option("--systems", options.systems)->delimiter(',')->check(names(bench::kSystems))->capture_default_str();
  app.add_flag("--tiny", options.tiny, "Three sizes, one round: does it work at all?");
  CLI11_PARSE(app, argc, argv);
  bench::remember_interrupts();
  try {
    run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_all_reduce: %s\n", error.what());
    return 1;
  }
}
