// Programs that fail by themselves, and obstacles to their output.

#include <algorithm>

#include "faultbox/cases.h"

namespace lockstep::faultbox {
namespace {

const std::vector<std::string>& operations() {
  static const std::vector<std::string> names = {"all_reduce", "broadcast",      "reduce",     "all_gather", "gather",
                                                 "scatter",    "reduce_scatter", "all_to_all", "barrier"};
  return names;
}

/// What the others do at a step, and what the odd rank does instead.
struct Pair {
  std::string usual, other;
};

std::vector<Pair> all_pairs() {
  std::vector<Pair> pairs;
  for (const auto& usual : operations()) {
    for (const auto& other : operations())
      if (other != usual) pairs.push_back({usual, other});
    for (const char* other : {"skip", "leave", "stay away"}) pairs.push_back({usual, other});
  }
  for (const char* other : {"all_reduce_longer", "all_reduce_double", "all_reduce_max"})
    pairs.push_back({"all_reduce", other});
  pairs.push_back({"broadcast", "broadcast_from_1"});
  return pairs;
}

/// The name that the launcher uses, without what faultbox adds.
std::string engine_name(const std::string& operation) {
  for (const char* family : {"all_reduce_", "broadcast_"})
    if (operation.starts_with(family)) return std::string(family).substr(0, std::string(family).size() - 1);
  return operation;
}

}  // namespace

Outcome crash_case(Shared&, Draw& draw, int instance) {
  struct Kind {
    const char* fault;
    int code;
    const char* said;
  };
  static const std::vector<Kind> kinds = {{"segv", 41, "SIGSEGV"},
                                          {"abort", 41, "SIGABRT"},
                                          {"exception", 40, "the exception that faultbox asked for"},
                                          {"exit0", 44, "exit code 0"},
                                          {"_exit", 40, "exit code 3"},
                                          {"fork", 41, "SIGKILL"},
                                          {"memory", 40, "bad_alloc"}};
  const Kind& kind = kinds[static_cast<size_t>(instance) % kinds.size()];
  const int ranks = static_cast<int>(draw.number(2, 3));
  const auto rank = static_cast<int>(draw.number(0, ranks - 1));
  const Place place = draw.one_of<Place>({Place::kRendezvous, Place::kForward, Place::kBucket, Place::kOptimizer});
  // One that ends with 0 is missed: by ranks that wait to join, or in their next collective.
  const int code = kind.code == 44 && place == Place::kRendezvous ? 46 : kind.code;
  const std::string at = kPlaceNames[static_cast<size_t>(place)];
  const int64_t step = draw.number(0, kSteps - 1), bucket = draw.number(0, 5);
  Outcome outcome{.drawn = std::string(kind.fault) + ", " + text(ranks) + " ranks, rank " + text(rank) + " in " + at +
                           " of step " + text(step) + ", bucket " + text(bucket)};
  Run run({.ranks = ranks,
           .words = {"steps=" + text(kSteps), "fault=" + std::string(kind.fault), "rank=" + text(rank), "at=" + at,
                     "step=" + text(step), "bucket=" + text(bucket)}});
  if (!run.wait(kLongest)) outcome.problems.emplace_back("does not end");
  // A rank that leaves by itself needs time for it; nobody can know before it has left.
  const bool leaves = code != 41 && run.rank_ended_ns(rank) != 0;
  expect(outcome, run,
         {.codes = {code},
          .culprits = {rank},
          .fault_ns = leaves ? run.rank_ended_ns(rank) : run.page().ranks[rank].fault_ns.load()});
  if (outcome.output.find(kind.said) == std::string::npos)
    outcome.problems.push_back(std::string("does not say \"") + kind.said + "\"");
  return outcome;
}

Outcome collectives_case(Shared& shared, Draw& draw, int instance) {
  static const std::vector<Pair> pairs = all_pairs();
  // At night each in turn, else at random.
  const Pair pair = shared.nightly ? pairs[static_cast<size_t>(instance) % pairs.size()] : draw.one_of(pairs);
  const int ranks = static_cast<int>(draw.number(2, 3));
  const auto rank = static_cast<int>(draw.number(0, ranks - 1));
  Outcome outcome{.drawn =
                      "all call " + pair.usual + ", rank " + text(rank) + " of " + text(ranks) + ": " + pair.other};
  Run run({.ranks = ranks,
           .options = {"--hang-timeout", "5"},
           .words = {"collectives=1", "usual=" + pair.usual, "other=" + pair.other, "rank=" + text(rank)}});
  if (!run.wait(kLongest)) outcome.problems.emplace_back("does not end");
  const bool missing = pair.other == "stay away";
  std::vector<int> culprits = {rank};
  // Of two ranks that make different calls, either may be named first.
  for (int other = 0; other < ranks && !missing && pair.other != "leave"; ++other) culprits.push_back(other);
  expect(outcome, run,
         {.codes = {missing ? 43 : 44},
          .culprits = culprits,
          .fault_ns = run.page().ranks[rank].fault_ns.load(),
          .known_within_s = pair.other == "leave" ? 1.0 : 10.0,
          .end_within_s = 12});
  const auto says = [&](const std::string& words) {
    if (outcome.output.find(words) == std::string::npos) outcome.problems.push_back("does not say \"" + words + "\"");
  };
  says(pair.usual);
  const size_t headline = outcome.output.find(" make different calls");
  if (headline == std::string::npos) {
    says("rank " + text(rank));
  } else {
    // "lockstep: rank 0 of 3 and rank 2 make different calls": of more than two, which one is the odd one counts.
    const size_t line = outcome.output.rfind("lockstep: rank ", headline);
    const std::string pair_named = outcome.output.substr(line, headline - line) + " ";
    if (pair_named.find("rank " + text(rank) + " ") == std::string::npos)
      outcome.problems.push_back("does not name rank " + text(rank) + " but \"" + pair_named + "\"");
  }
  if (pair.other != "skip" && pair.other != "leave" && !missing) says(engine_name(pair.other));
  return outcome;
}

Outcome output_case(Shared& shared, Draw& draw, int instance) {
  const int ranks = static_cast<int>(draw.number(2, 3));
  const auto rank = static_cast<int>(draw.number(0, ranks - 1));
  const int64_t step = draw.number(0, kSteps - 1);
  const int kind = instance % 3;
  const int64_t bytes = kind != 0 ? int64_t{4} << 20 : shared.nightly ? int64_t{1} << 30 : int64_t{128} << 20;
  RunPlan plan{.ranks = ranks,
               .options = {"--tee", "all"},
               .words = {"steps=" + text(kSteps), "fault=flood", "rank=" + text(rank), "at=forward",
                         "step=" + text(step), "bytes=" + text(bytes), "pause_ms=20"}};
  Outcome outcome{.drawn =
                      text(bytes) + " bytes from rank " + text(rank) + " of " + text(ranks) + " in step " + text(step)};
  if (kind == 1) {
    plan.terminal = true;
    outcome.drawn += ", on a terminal that is closed in step " + text(step);
  } else if (kind == 2) {
    plan.run_folder_bytes = 1 << 20;
    outcome.drawn += ", with 1 MiB of disk for the run folder";
    plan.folder = std::make_shared<TemporaryFolder>();
    plan.words.push_back("checkpoints=" + (plan.folder->path() / "checkpoints").string());
  }
  Run run(std::move(plan));
  if (kind == 1) {
    auto& mine = run.page().ranks[rank];
    run.wait_until([&] { return mine.place.load() >= Place::kForward && mine.step.load() >= step; },
                   std::chrono::milliseconds(20000));
    run.hang_up();
  }
  if (!run.wait(2 * kLongest)) outcome.problems.emplace_back("does not end");
  if (kind == 2 && run.exit_code() == Run::kNoFileSystem) {
    outcome.skipped = "a file system cannot be mounted here";
    return outcome;
  }
  expect_same_result(outcome, run, shared, ranks, kSteps);
  outcome.end_ms = static_cast<double>(run.ended_ns() - run.page().ranks[rank].fault_ns.load()) / 1e6;
  if (kind == 2 && outcome.output.find("No space left") == std::string::npos)
    outcome.problems.emplace_back("does not say that the disk is full");
  return outcome;
}

}  // namespace lockstep::faultbox
