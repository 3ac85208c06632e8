#include "contest.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>

namespace lockstep::bench {
namespace {

/// A sample shorter than this is a batch, so that neither the clock nor the ranks' start beside each other counts.
constexpr double kSampleNs = 20'000;
constexpr double kMaxSamples = 200;
/// From here on the caches hold nothing of the last operation, so there is nothing to warm.
constexpr double kLongNs = 5'000'000;
/// A system this slow is not asked for larger sizes of the same case.
constexpr double kTooSlowNs = 1'000'000'000;
/// A case that took a system this long in all is not measured further. Three samples are taken in any case.
constexpr double kEnoughNs = 4'000'000'000;

double quantile(const std::vector<double>& sorted, double q) {
  const auto rank = static_cast<size_t>(std::ceil(q * static_cast<double>(sorted.size())));
  return sorted[std::max<size_t>(rank, 1) - 1];
}

double median(const std::vector<double>& sorted) {
  const size_t half = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

double least(const std::vector<double>& samples) { return *std::ranges::min_element(samples); }

double microseconds(double ns) { return std::round(ns) / 1000; }

}  // namespace

Contest::Contest(std::vector<System> systems, ContestOptions options, const std::string& folder)
    : options_(std::move(options)) {
  for (System& system : systems) {
    Entry entry{std::move(system), nullptr, "", ""};
    const std::string own = folder + "/" + entry.system.name;
    std::filesystem::create_directory(own);
    try {
      entry.job = std::make_unique<CollectiveJob>(entry.system, options_.ranks, own);
      entry.version = entry.job->version();
      std::fprintf(stderr, "%-15s %s\n", entry.system.name.c_str(), entry.version.c_str());
    } catch (const JobError& error) {
      entry.failure = error.what();
      std::fprintf(stderr, "%-15s is out: %s\n", entry.system.name.c_str(), error.what());
    }
    entries_.push_back(std::move(entry));
  }
}

template <typename Step>
void Contest::everybody(const Case& wanted, int turn, Step step) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const size_t index = (i + static_cast<size_t>(turn)) % entries_.size();
    if (!entries_[index].job) continue;
    try {
      (this->*step)(index, wanted);
    } catch (const JobError& error) {
      drop(index, wanted.text() + ": " + error.what());
    }
  }
}

void Contest::run(const std::function<void()>& between, const std::function<void()>& after_round) {
  std::fprintf(stderr, "checking %zu cases\n", options_.cases.size());
  for (const Case& wanted : options_.cases) between(), everybody(wanted, 0, &Contest::check);
  for (int round = 1; round <= options_.rounds; ++round) {
    const TriadRates rates = measure_triad(options_.ranks, options_.triad_bytes, 3);
    triad_.plain_gb_per_s = std::max(triad_.plain_gb_per_s, rates.plain_gb_per_s);
    triad_.streaming_gb_per_s = std::max(triad_.streaming_gb_per_s, rates.streaming_gb_per_s);
    std::fprintf(stderr, "round %d of %d, triad %.1f GB/s\n", round, options_.rounds,
                 std::max(rates.plain_gb_per_s, rates.streaming_gb_per_s));
    for (const Case& wanted : options_.cases) between(), everybody(wanted, round, &Contest::measure);
    ++rounds_;
    after_round();
  }
}

std::string Contest::too_slow(size_t index, const Case& wanted) const {
  for (const auto& [key, estimate] : estimates_ns_) {
    const auto& [measured_index, measured] = key;
    Case same = measured;
    same.bytes = wanted.bytes;
    if (measured_index == index && same == wanted && measured.bytes < wanted.bytes && estimate > kTooSlowNs)
      return "too slow: " + std::to_string(measured.bytes) + " bytes took " + std::to_string(estimate / 1e9) + " s";
  }
  return "";
}

void Contest::check(size_t index, const Case& wanted) {
  if (const std::string reason = too_slow(index, wanted); !reason.empty()) {
    not_offered_[{index, wanted}] = reason;
    return;
  }
  CollectiveJob& job = *entries_[index].job;
  const CollectiveJob::Verdict verdict = job.check(wanted);
  if (verdict.kind == CollectiveJob::Verdict::kNotOffered) {
    not_offered_[{index, wanted}] = verdict.text;
  } else if (verdict.kind == CollectiveJob::Verdict::kWrong) {
    drop(index, "wrong result of " + wanted.text() + ": " + verdict.text);
  } else {
    double estimate = least(job.time(wanted, 1, 3, 1));
    if (estimate < kLongNs) estimate = std::min(estimate, least(job.time(wanted, 3, 10, 3)));
    estimates_ns_[{index, wanted}] = estimate;
  }
}

void Contest::measure(size_t index, const Case& wanted) {
  const auto estimate = estimates_ns_.find({index, wanted});
  if (estimate == estimates_ns_.end()) return;
  std::vector<double>& all = samples_ns_[{index, wanted}];
  if (all.size() >= 3 && static_cast<double>(all.size()) * estimate->second > kEnoughNs) return;
  const Plan plan = plan_for(estimate->second);
  const std::vector<double> times = entries_[index].job->time(wanted, plan.warm, plan.samples, plan.batch);
  all.insert(all.end(), times.begin(), times.end());
  estimate->second = std::min(estimate->second, least(times));  // the first one is rough
}

Contest::Plan Contest::plan_for(double estimate_ns) const {
  const double operation = std::max(estimate_ns, 20.0);
  const double batch = std::max(1.0, std::ceil(kSampleNs / operation));
  const double samples = std::clamp(options_.slice_ms * 1e6 / (batch * operation), 1.0, kMaxSamples);
  return {operation > kLongNs ? 0 : static_cast<size_t>(batch), static_cast<size_t>(samples),
          static_cast<size_t>(batch)};
}

void Contest::drop(size_t index, const std::string& reason) {
  Entry& entry = entries_[index];
  std::fprintf(stderr, "%s is out: %s\n", entry.system.name.c_str(), reason.c_str());
  entry.failure = reason;
  entry.job.reset();
}

nlohmann::ordered_json Contest::result() const {
  using Json = nlohmann::ordered_json;
  Json rows = Json::array(), not_offered = Json::array(), systems = Json::object(), failed = Json::object();
  for (const Entry& entry : entries_) {
    if (!entry.version.empty())
      systems[entry.system.name] = {{"version", entry.version}, {"settings", entry.system.settings}};
    if (!entry.failure.empty()) failed[entry.system.name] = entry.failure;
  }
  const auto describe = [&](const Key& key) -> nlohmann::ordered_json {
    const auto& [index, measured] = key;
    return {{"operation", name_of(measured.operation)},
            {"dtype", name_of(measured.dtype)},
            {"bytes", measured.bytes},
            {"ranks", options_.ranks},
            {"placement", name_of(measured.placement)},
            {"system", entries_[index].system.name}};
  };
  for (auto [key, samples] : samples_ns_) {
    std::ranges::sort(samples);
    nlohmann::ordered_json row = describe(key);
    row["median_us"] = microseconds(median(samples));
    row["min_us"] = microseconds(samples.front());
    row["p99_us"] = microseconds(quantile(samples, 0.99));
    row["samples"] = samples.size();
    rows.push_back(std::move(row));
  }
  for (const auto& [key, reason] : not_offered_) {
    nlohmann::ordered_json line = describe(key);
    line["reason"] = reason;
    not_offered.push_back(std::move(line));
  }
  return {{"rounds", rounds_},
          {"triad_gb_per_s", std::max(triad_.plain_gb_per_s, triad_.streaming_gb_per_s)},
          {"triad", {{"plain_gb_per_s", triad_.plain_gb_per_s}, {"streaming_gb_per_s", triad_.streaming_gb_per_s}}},
          {"systems", systems},
          {"failed", failed},
          {"rows", rows},
          {"not_offered", not_offered}};
}

}  // namespace lockstep::bench
