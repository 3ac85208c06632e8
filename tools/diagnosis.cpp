#include "diagnosis.h"

#include "base/hash.h"
#include "base/text.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;
using Level = Finding::Level;

constexpr double kGradientTolerance = 1e-12;  // of doubles, relative to the largest
constexpr double kLowShareOfTriad = 0.3;
constexpr uint64_t kLowMemory = uint64_t{1} << 30;
constexpr uint64_t kFewDescriptors = 1024;

std::string gib(double bytes) { return formatted("%.1f GiB", bytes / (1 << 30)); }

/// A number, or "unlimited", as text.
std::string text_of(const Json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

void judge_machine(const Json& machine, std::vector<Finding>& findings) {
  const Json& cores = machine["cores"];
  if (!cores["quota"].is_null() && cores["quota"] < cores["usable"])
    findings.push_back(
        {Level::kNote,
         "the cgroup grants " + formatted("%.1f", cores["quota"]) + " of " + cores["usable"].dump() + " cores' time",
         "-n auto starts " + cores["auto_ranks"].dump() + "; more ranks only take turns"});
  if (cores["usable"] == 1)
    findings.push_back(
        {Level::kNote, "this process may use only one core", "check `taskset -p $$` and the container's options"});
  const Json& memory = machine["memory"];
  if (memory["available_bytes"] < kLowMemory)
    findings.push_back({Level::kWarning, "only " + gib(memory["available_bytes"]) + " of memory is available",
                        "free some, or start fewer ranks: a rank with LibTorch takes 0.2 GiB before it holds a model"});
  const Json& limits = machine["limits"];
  if (limits["descriptors"]["hard"].is_number() && limits["descriptors"]["hard"] < kFewDescriptors)
    findings.push_back({Level::kWarning, "a process may open only " + limits["descriptors"]["hard"].dump() + " files",
                        "the launcher needs 5 per rank; raise ulimit -n"});
  if (limits["file_bytes"]["soft"].is_number())
    findings.push_back({Level::kWarning, "files may hold only " + limits["file_bytes"]["soft"].dump() + " bytes",
                        "larger checkpoints and logs are cut off; raise ulimit -f"});
  if (limits["address_space_bytes"]["soft"].is_number())
    findings.push_back({Level::kWarning, "a process may map only " + gib(limits["address_space_bytes"]["soft"]),
                        "shared memory reserves address space beyond what it uses; raise ulimit -v"});
}

void judge_probe(const Json& probe, std::vector<Finding>& findings) {
  const std::string version = probe["torch"]["version"];
  if (!version.starts_with("2.11.") && !version.starts_with("2.12.") && !version.starts_with("2.13.") &&
      !version.starts_with("2.14.") && !version.starts_with("2.15."))
    findings.push_back({Level::kWarning, "LibTorch " + version + " is not supported; Lockstep is made for 2.11 to 2.15",
                        "set TORCH_DIR to one of these and build again"});
  const double difference = probe["gradients"]["relative_difference"];
  if (!(difference <= kGradientTolerance))
    findings.push_back(
        {Level::kBroken,
         "the gradients of two ranks differ from those of one process by a relative " + formatted("%.2g", difference),
         "run `make test`, and report this block with its first failure"});
  const Json& reduced = probe["all_reduce"];
  if (reduced["correct"] != true)
    findings.push_back({Level::kBroken, "an all-reduce of " + reduced["bytes"].dump() + " bytes gave wrong values",
                        "run build/bin/shm_all_reduce_test, and report this block with what it says"});
  const double share = reduced["share_of_triad"];
  if (share < kLowShareOfTriad)
    findings.push_back({Level::kWarning,
                        "all-reduce reaches " + formatted("%.0f", 100 * share) + " % of the memory's bandwidth",
                        "check with `top` whether other programs are busy; try again with --bind core"});
}

}  // namespace

const char* name_of(Finding::Level level) {
  return level == Level::kNote ? "note" : level == Level::kWarning ? "warning" : "broken";
}

std::vector<Finding> diagnose(const Json& facts) {
  std::vector<Finding> findings;
  judge_machine(facts["machine"], findings);
  if (facts["probe"].is_null())
    findings.push_back({facts["probe_missing"] == true ? Level::kNote : Level::kBroken, facts["probe_failure"],
                        facts["probe_advice"]});
  else
    judge_probe(facts["probe"], findings);
  if (const std::string failure = facts["gloo_failure"]; !failure.empty())
    findings.push_back({Level::kWarning, "Gloo does not work here: " + failure,
                        "check that the loopback interface is up; only ranks on several machines need Gloo"});
  return findings;
}

namespace {

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

/// One word for all bits: two machines with the same word agree in all operators.
std::string describe_bits(const Json& bits) {
  Hash all;
  for (const auto& [name, hash] : bits["operators"].items()) all.add(name + hash.get<std::string>());
  const auto others = bits["other_bits_with_two_threads"].get<std::vector<std::string>>();
  return all.digits().substr(0, 8) + " with one thread; " +
         (others.empty() ? "the same with two" : "two threads give others in " + list(others));
}

}  // namespace

std::vector<Finding> compare_bits(const Json& facts, const Json& other) {
  const auto bits_of = [](const Json& one) {
    return one.is_object() ? one.value(Json::json_pointer("/probe/bits"), Json()) : Json();
  };
  const Json mine = bits_of(facts), theirs = bits_of(other);
  if (mine.is_null() || !theirs.is_object() || !theirs.value("operators", Json()).is_object())
    return {{Level::kWarning, "the bits of the two machines cannot be compared",
             "the other file must be what `lockstep doctor --json` printed there, with this version"}};
  std::vector<std::string> differ;
  for (const auto& [name, hash] : mine["operators"].items())
    if (theirs["operators"].value(name, Json()) != hash) differ.push_back(name);
  if (differ.empty()) return {};
  std::string advice;
  const auto compare = [&](const char* what, const Json& here, const Json& there) {
    if (here != there)
      advice += (advice.empty() ? "" : "; ") + (what + (" is " + here.dump()) + " here and " + there.dump() + " there");
  };
  const auto torch = [](const Json& one, const char* what) {
    return one.value(Json::json_pointer(std::string("/probe/torch/") + what), Json());
  };
  compare("LibTorch", torch(facts, "version"), torch(other, "version"));
  compare("its instruction set", torch(facts, "cpu_capability"), torch(other, "cpu_capability"));
  for (const char* name : {"ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"})
    compare(name, mine[name], theirs.value(name, Json()));
  return {{Level::kNote, "the other machine gives different bits in " + list(differ),
           (advice.empty() ? "the processors are of different kinds" : advice) +
               ". Keep runs that must be exact on one kind, or set ATEN_CPU_CAPABILITY=avx2, MKL_CBWR=AVX2,STRICT and "
               "ONEDNN_MAX_CPU_ISA=AVX2 on both"}};
}

namespace {

std::string describe_launchers(const Json& launchers) {
  std::string text;
  for (const auto& [name, version] : launchers.items())
    text += (text.empty() ? "" : "; ") + name + ": " + version.get<std::string>();
  return text.empty() ? "no MPI, Slurm or torchrun in PATH" : text;
}

std::string describe_cores(const Json& cores) {
  return cores["usable"].dump() + " usable of " + cores["online"].dump() + ", " +
         (cores["quota"].is_null() ? "no quota" : "a quota of " + formatted("%.2f", cores["quota"]));
}

std::string describe_memory(const Json& memory) {
  const Json& limit = memory["cgroup_limit_bytes"];
  return gib(memory["total_bytes"]) + ", " + gib(memory["available_bytes"]) + " available" +
         (limit.is_null() ? "" : ", the cgroup's limit " + gib(limit));
}

std::string describe_torch(const Json& torch) {
  const int devices = torch["cuda_devices"];
  return torch["version"].get<std::string>() + (torch["cxx11_abi"] == true ? ", C++11 ABI" : ", the ABI before C++11") +
         ", " + torch["cpu_capability"].get<std::string>() + ", " +
         (devices == 0 ? "no CUDA device" : std::to_string(devices) + " CUDA devices");
}

std::string describe_all_reduce(const Json& reduced) {
  return "all-reduce of " + gib(reduced["bytes"]) + " on 2 ranks in " + formatted("%.1f ms", reduced["milliseconds"]) +
         ": " + formatted("%.1f GB/s", reduced["gb_per_s"]) + ", " +
         formatted("%.0f %%", 100 * double{reduced["share_of_triad"]}) + " of the triad's " +
         formatted("%.1f GB/s", reduced["triad_gb_per_s"]);
}

}  // namespace

std::string format_diagnosis(const Json& facts, const std::vector<Finding>& findings) {
  const Json &machine = facts["machine"], &probe = facts["probe"];
  std::string text = "lockstep doctor, version " + facts["lockstep"].get<std::string>() + "\n";
  const auto line = [&](const char* what, const std::string& value) {
    text.append("  ").append(what).append(12 - std::char_traits<char>::length(what), ' ').append(value).push_back('\n');
  };
  line("system", machine["system"]["distribution"].get<std::string>() + ", " +
                     machine["system"]["kernel"].get<std::string>() + ", glibc " +
                     machine["system"]["glibc"].get<std::string>());
  const std::string vectors = machine["processor"]["vectors"];
  line("processor", machine["processor"]["name"].get<std::string>() + (vectors.empty() ? "" : ", " + vectors));
  line("cores", describe_cores(machine["cores"]));
  line("NUMA", std::to_string(machine["numa_nodes"].size()) + (machine["numa_nodes"].size() == 1 ? " node" : " nodes"));
  line("memory", describe_memory(machine["memory"]));
  line("limits", "descriptors " + text_of(machine["limits"]["descriptors"]["soft"]) + " (at most " +
                     text_of(machine["limits"]["descriptors"]["hard"]) + "), processes " +
                     text_of(machine["limits"]["processes"]["soft"]) + ", locked memory " +
                     text_of(machine["limits"]["locked_memory_bytes"]["soft"]));
  line("launchers", describe_launchers(machine["launchers"]));
  if (!probe.is_null()) {
    line("LibTorch", describe_torch(probe["torch"]));
    line("backends",
         probe["backend"].get<std::string>() + " works, gloo " + (facts["gloo_failure"] == "" ? "works" : "does not"));
    line("gradients", "two ranks against one process: relative difference " +
                          formatted("%.2g", probe["gradients"]["relative_difference"]));
    line("bandwidth", describe_all_reduce(probe["all_reduce"]));
    line("bits", describe_bits(probe["bits"]));
  } else if (facts["probe_missing"] == true) {
    line("LibTorch", "not checked (see the note)");
  }
  if (findings.empty()) text += "  findings    none\n";
  for (const Finding& finding : findings)
    text.append("  ")
        .append(name_of(finding.level))
        .append(": ")
        .append(finding.what)
        .append("\n      -> ")
        .append(finding.advice + "\n");
  return text;
}

}  // namespace lockstep
