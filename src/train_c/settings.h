#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace lockstep::train_c {

/// An object of the configuration. Every entry must be asked for: finish() refuses the others by name. All functions
/// throw LOCKSTEP_INVALID_ARGUMENT, naming the entry.
class Settings {
 public:
  /// `text` is JSON, if it begins with a brace, or the path of a file. Throws LOCKSTEP_TRAIN_FILE_FAILED for a file
  /// that cannot be read.
  static Settings read(const std::string& text);

  /// `name` is the path in the configuration, "optimizer"; empty: all of it.
  Settings(std::string name, nlohmann::json values);

  std::optional<double> number(const std::string& key);
  std::optional<int64_t> whole(const std::string& key, int64_t least);
  std::optional<bool> flag(const std::string& key);
  std::optional<std::string> text(const std::string& key);
  /// With a default, which is as good as the entry.
  double number(const std::string& key, double otherwise);
  int64_t whole(const std::string& key, int64_t least, int64_t otherwise);
  bool flag(const std::string& key, bool otherwise);
  std::string text(const std::string& key, const std::string& otherwise);
  std::optional<std::vector<int64_t>> wholes(const std::string& key);
  /// An object; if `takes_name`, a text `name` stands for {"type": name}.
  std::optional<Settings> part(const std::string& key, bool takes_name = true);
  /// An empty one if there is none.
  Settings part_or_empty(const std::string& key);
  bool has(const std::string& key) const { return values_.contains(key); }

  double required_number(const std::string& key);
  int64_t required_whole(const std::string& key, int64_t least);
  std::string required_text(const std::string& key);

  void finish() const;
  [[noreturn]] void refuse_entry(const std::string& key, const std::string& why) const;
  /// A line for each value that was asked for, defaults included: "optimizer/lr 0.1". Settings that mean the same have
  /// the same lines. Types come first, since the other entries depend on them.
  std::string lines() const;

 private:
  using Lines = std::set<std::pair<bool, std::string>>;  ///< whether it is no type, and its text

  Settings(std::string name, nlohmann::json values, std::shared_ptr<Lines> lines);

  const nlohmann::json* find(const std::string& key);
  /// Adds a line.
  void note(const std::string& key, const nlohmann::json& value);
  std::string place(const std::string& key) const { return name_.empty() ? key : name_ + "." + key; }
  [[noreturn]] void refuse_missing(const std::string& key) const;

  std::string name_;
  nlohmann::json values_;
  std::vector<std::string> known_;
  std::shared_ptr<Lines> lines_;  ///< of the whole configuration
};

}  // namespace lockstep::train_c
