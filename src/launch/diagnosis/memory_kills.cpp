#include "launch/diagnosis/memory_kills.h"

#include <filesystem>
#include <fstream>

#include "base/proc_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

/// The number after `key` in a file of "key number" lines.
std::optional<uint64_t> value_of(const fs::path& path, const std::string& key) {
  std::ifstream file(path);
  std::string name;
  for (uint64_t value = 0; file >> name >> value;)
    if (name == key) return value;
  return std::nullopt;
}

std::optional<uint64_t> number_in_file(const fs::path& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (!(file >> value)) return std::nullopt;                                 // "max"
  return value < (uint64_t{1} << 62) ? std::optional(value) : std::nullopt;  // version 1's "no limit"
}

/// The folder of this process's memory cgroup, and the file names of its version.
struct Place {
  fs::path root;
  fs::path group;
  std::string events, limit;
};

std::optional<Place> find_place(const std::string& root) {
  std::optional<Place> place;
  for (const Cgroup& group : own_cgroups(root)) {
    const fs::path relative = fs::path(group.path).relative_path();
    if (group.has("memory"))
      return Place{root + "/sys/fs/cgroup/memory", relative, "memory.oom_control", "memory.limit_in_bytes"};
    if (group.is_v2()) place = Place{root + "/sys/fs/cgroup", relative, "memory.events", "memory.max"};
  }
  return place;
}

}  // namespace

MemoryKills count_memory_kills(const std::string& root) {
  MemoryKills kills;
  if (const auto place = find_place(root)) {
    fs::path folder = place->root;
    const auto look = [&] {
      if (const auto limit = number_in_file(folder / place->limit);
          limit && *limit < kills.limit_bytes.value_or(UINT64_MAX))
        kills.limit_bytes = limit;
      // In version 2 a count includes nested groups: the innermost group with a count is the most specific.
      if (const auto count = value_of(folder / place->events, "oom_kill")) {
        kills.count = *count;
        kills.counted_in =
            "the cgroup " + (fs::path("/") / folder.lexically_relative(place->root)).lexically_normal().string();
      }
    };
    look();
    for (const auto& part : place->group) {
      folder /= part;
      look();
    }
  }
  if (kills.counted_in.empty()) {
    if (const auto count = value_of(root + "/proc/vmstat", "oom_kill")) {
      kills.count = *count;
      kills.counted_in = "the whole machine";
    }
  }
  return kills;
}

}  // namespace lockstep
