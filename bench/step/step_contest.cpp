#include "step_contest.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "workers/machine.h"

namespace lockstep::bench {
namespace {

constexpr size_t kFewestSteps = 2, kMostSteps = 60;
/// Memory grows over the first steps; where one takes long, the first few have to do.
constexpr size_t kFewestSettling = 3;
constexpr double kSettlingMs = 1000;
/// Systems sum in another order and copy in another layout; the same step differs by rounding.
constexpr double kLossTolerance = 1e-4;
/// Of the small ResNet: weights that differ by 1e-7 have losses in the fourth step that differ by 4e-3, in doubles,
/// too.
constexpr size_t kStepsOfResnet = 2;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

std::vector<double> joined(const std::vector<std::vector<double>>& rounds) {
  std::vector<double> all;
  for (const auto& round : rounds) all.insert(all.end(), round.begin(), round.end());
  return all;
}

double mean_loss(const StepJob::Check& check, size_t step) {
  double sum = 0;
  for (const auto& losses : check.losses) sum += losses[step];
  return sum / static_cast<double>(check.losses.size());
}

double thousandths(double value) { return std::round(value * 1000) / 1000; }

}  // namespace

StepContest::StepContest(StepWork work, std::vector<System> systems, StepContestOptions options, std::string folder)
    : work_(std::move(work)), options_(options), folder_(std::move(folder)) {
  for (System& system : systems) {
    entries_.emplace_back();
    entries_.back().system = std::move(system);
  }
}

std::string StepContest::full_name(const Entry& entry) const {
  return work_.model + ", " + work_.optimizer + ", " + entry.system.name;
}

template <typename Step>
void StepContest::everybody(size_t first, Step step) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    check_interrupts();
    Entry& entry = entries_[(first + i) % entries_.size()];
    if (failed_.contains(full_name(entry))) continue;
    try {
      step(entry);
    } catch (const JobError& error) {
      std::fprintf(stderr, "%s is out: %s\n", full_name(entry).c_str(), error.what());
      failed_[full_name(entry)] = error.what();
      entry.job.reset();
    }
  }
}

void StepContest::run() {
  // One after the other: while a system's memory is watched, nothing else runs, nor does any watch go on.
  everybody(0, [&](Entry& entry) {
    start(entry, folder_);
    check(entry);
    if (options_.rounds == 0) entry.job.reset();
  });
  for (int round = 0; round < options_.rounds; ++round) {
    std::fprintf(stderr, "%s, %s, round %d of %d\n", work_.model.c_str(), work_.optimizer.c_str(), round + 1,
                 options_.rounds);
    everybody(static_cast<size_t>(round), [&](Entry& entry) { measure(entry); });
  }
  for (Entry& entry : entries_) entry.job.reset();
}

void StepContest::start(Entry& entry, const std::string& folder) {
  const std::string own = folder + "/" + entry.system.name;
  std::filesystem::create_directories(own);
  entry.job = std::make_unique<StepJob>(entry.system, processes_of(entry.system.name, work_.ranks), own);
  entry.attach_ms = entry.job->attach();
}

bool StepContest::is_checked(const Entry& entry) const {
  return !entry.check.losses.empty() && !failed_.contains(full_name(entry));
}

const StepContest::Entry* StepContest::reference_for_losses(const Entry& entry) const {
  const auto fits = [&](const Entry& other) {
    return &other != &entry && is_checked(other) &&
           is_side_by_side(other.system.name) == is_side_by_side(entry.system.name);
  };
  for (const Entry& other : entries_)
    if (fits(other) && other.check.losses.size() == entry.check.losses.size()) return &other;
  for (const Entry& other : entries_)
    if (fits(other)) return &other;
  return nullptr;
}

void StepContest::compare_losses(const Entry& entry) const {
  const Entry* reference = reference_for_losses(entry);
  const auto compare_one = [&](double mine, double theirs, const Entry& other, size_t rank, size_t step) {
    if (!(std::abs(mine - theirs) <= kLossTolerance * std::max(std::abs(theirs), 1e-3)))
      entry.job->fail("wrong: rank " + std::to_string(rank) + " has a loss of " + std::to_string(mine) + " in step " +
                      std::to_string(step) + ", " + other.system.name + " has " + std::to_string(theirs));
  };
  const auto compare = [&](const Entry& other, size_t steps) {
    const bool same_ranks = entry.check.losses.size() == other.check.losses.size();
    // The loss of a whole batch is the mean of its parts' losses, unless batch norm takes it as a whole.
    if (!same_ranks && work_.model == "resnet") return;
    for (size_t step = 0; step < steps; ++step)
      if (!same_ranks)
        compare_one(mean_loss(entry.check, step), mean_loss(other.check, step), other, 0, step);
      else
        for (size_t rank = 0; rank < entry.check.losses.size(); ++rank)
          compare_one(entry.check.losses[rank][step], other.check.losses[rank][step], other, rank, step);
  };
  if (&entry != &entries_.front() && is_checked(entries_.front())) compare(entries_.front(), 1);
  const size_t steps = work_.model == "resnet" ? std::min(kStepsOfResnet, options_.check_steps) : options_.check_steps;
  if (reference != nullptr) compare(*reference, steps);
}

void StepContest::check(Entry& entry) {
  const auto start = std::chrono::steady_clock::now();
  entry.check = entry.job->check(options_.check_steps);
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
  entry.estimate_ms = taken.count() / static_cast<double>(options_.check_steps);
  const auto& weights = entry.check.weights;
  if (!is_side_by_side(entry.system.name))
    for (const std::string& hash : weights)
      if (hash != weights.front())
        entry.job->fail("wrong: replicas differ after " + std::to_string(options_.check_steps) + " steps");
  compare_losses(entry);
  const auto settling = std::min(options_.settling_steps,
                                 std::max(kFewestSettling, static_cast<size_t>(kSettlingMs / entry.estimate_ms)));
  if (options_.settling_steps > 0) entry.job->time(settling - 1, 1);
  entry.peak_mib = entry.job->peak();
}

void StepContest::measure(Entry& entry) {
  const double wanted = options_.slice_ms / std::max(entry.estimate_ms, 0.01);
  const size_t steps = std::clamp(static_cast<size_t>(wanted), kFewestSteps, kMostSteps);
  StepJob::Times times = entry.job->time(std::max<size_t>(1, steps / 8), steps);
  entry.rounds_ms.push_back(std::move(times.steps_ms));
  entry.cpu_ms.push_back(times.cpu_ms);
  entry.estimate_ms = std::min(entry.estimate_ms, median(entry.rounds_ms.back()));  // the first one is rough
}

nlohmann::ordered_json StepContest::rows() const {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Entry& entry : entries_) {
    if (failed_.contains(full_name(entry))) continue;
    nlohmann::ordered_json row = {{"model", work_.model},
                                  {"optimizer", work_.optimizer},
                                  {"system", entry.system.name},
                                  {"rounds", entry.rounds_ms.size()},
                                  {"attach_ms", thousandths(entry.attach_ms)},
                                  {"peak_mib", thousandths(entry.peak_mib)}};
    if (!entry.rounds_ms.empty()) {
      const std::vector<double> all = joined(entry.rounds_ms);
      row["median_ms"] = thousandths(median(all));
      row["min_ms"] = thousandths(std::ranges::min(all));
      row["cpu_ms"] = thousandths(median(entry.cpu_ms));
      row["steps"] = all.size();
      std::vector<double> ratios;
      for (size_t i = 0; i < std::min(entry.rounds_ms.size(), entries_.front().rounds_ms.size()); ++i)
        ratios.push_back(median(entry.rounds_ms[i]) / median(entries_.front().rounds_ms[i]));
      if (!ratios.empty()) row["ratio"] = thousandths(median(ratios));
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace lockstep::bench
