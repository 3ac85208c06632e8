#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace lockstep {

/// A finding of `lockstep doctor`.
struct Finding {
  enum class Level { kNote, kWarning, kBroken };
  Level level;
  std::string what;
  std::string advice;
};

/// Judges the facts that `doctor` has gathered: {"machine": machine_facts(), "probe": the probe's object or null,
/// "probe_missing": whether there is no probe, "probe_failure": text, "gloo_failure": text}. A pure function.
std::vector<Finding> diagnose(const nlohmann::json& facts);

/// The operators whose bits differ between this machine and another, whose `lockstep doctor --json` printed `other`, so
/// that a run on both would not be exact. A pure function.
std::vector<Finding> compare_bits(const nlohmann::json& facts, const nlohmann::json& other);

/// The block to paste into a bug report.
std::string format_diagnosis(const nlohmann::json& facts, const std::vector<Finding>& findings);

/// "note", "warning", "broken".
const char* name_of(Finding::Level level);

}  // namespace lockstep
