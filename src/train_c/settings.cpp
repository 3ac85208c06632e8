#include "train_c/settings.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <sstream>
#include <utility>

#include "train_c/guarded.h"

namespace lockstep::train_c {

namespace {

/// A callback of the parser, for which the last of two entries with one key would count.
class RefusesSecondKeys {
 public:
  explicit RefusesSecondKeys(const std::string& where) : where_(where) {}

  bool operator()(int /*depth*/, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) keys_.emplace_back();
    if (event == Event::object_end) keys_.pop_back();
    if (event == Event::key && !keys_.back().insert(value.get<std::string>()).second)
      refuse(where_, "the key " + value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).substr(0, 100) +
                         " is given twice in one object; leave one out");
    return true;
  }

 private:
  const std::string& where_;
  std::vector<std::set<std::string>> keys_;  ///< of the objects that are open
};

}  // namespace

Settings Settings::read(const std::string& given) {
  std::string text = given;
  const size_t begin = given.find_first_not_of(" \t\r\n");
  const std::string_view first = begin == std::string::npos ? "" : std::string_view(given).substr(begin, 2);
  const bool is_file = !first.starts_with('{') && first != "/*" && first != "//";  // a comment may come first
  if (is_file) {
    std::ifstream file(given);
    std::ostringstream content;
    if (!file || !(content << file.rdbuf()))
      throw StatusError(LOCKSTEP_TRAIN_FILE_FAILED, "the configuration " + given.substr(0, 200) +
                                                        " cannot be read; give a file's path, or JSON in braces");
    text = content.str();
  }
  const std::string where = is_file ? "the configuration " + given : "the configuration";
  nlohmann::json values;
  try {
    RefusesSecondKeys refuses_second_keys(where);
    values = nlohmann::json::parse(text, std::ref(refuses_second_keys), /*allow_exceptions=*/true,
                                   /*ignore_comments=*/true);
  } catch (const nlohmann::json::parse_error& error) {
    refuse(where, "this is not JSON, at byte " + std::to_string(error.byte) + " of " + std::to_string(text.size()));
  } catch (const nlohmann::json::out_of_range& error) {  // its text ends with the number
    const std::string why = error.what();
    refuse(where, "a number is too large: " + why.substr(why.rfind(' ') + 1, 100));
  }
  if (!values.is_object()) refuse(where, "this is not a JSON object in braces");
  return {"", std::move(values)};
}

Settings::Settings(std::string name, nlohmann::json values)
    : Settings(std::move(name), std::move(values), std::make_shared<Lines>()) {}
Settings::Settings(std::string name, nlohmann::json values, std::shared_ptr<Lines> lines)
    : name_(std::move(name)), values_(std::move(values)), lines_(std::move(lines)) {}

void Settings::note(const std::string& key, const nlohmann::json& value) {
  lines_->emplace(key != "type", (name_.empty() ? "" : name_ + "/") + key + " " +
                                     value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

std::string Settings::lines() const {
  std::string text;
  for (const auto& [is_no_type, line] : *lines_) text += line;
  return text;
}

const nlohmann::json* Settings::find(const std::string& key) {
  known_.push_back(key);
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &*found;
}

void Settings::refuse_entry(const std::string& key, const std::string& why) const {
  const auto found = values_.find(key);
  const std::string value =
      found == values_.end()
          ? ""
          : " is " + found->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).substr(0, 100) + ";";
  throw StatusError(LOCKSTEP_INVALID_ARGUMENT, "the configuration's " + place(key) + value + " " + why);
}
void Settings::refuse_missing(const std::string& key) const {
  throw StatusError(LOCKSTEP_INVALID_ARGUMENT, "the configuration has no " + place(key) + ", which is required");
}

std::optional<double> Settings::number(const std::string& key) {
  const nlohmann::json* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) refuse_entry(key, "give a number");
  note(key, value->get<double>());
  return value->get<double>();
}
std::optional<int64_t> Settings::whole(const std::string& key, int64_t least) {
  const nlohmann::json* const value = find(key);
  if (value == nullptr) return std::nullopt;
  constexpr int64_t kMost = int64_t{1} << 53;
  if (!value->is_number_integer() || value->get<double>() > kMost || value->get<double>() < static_cast<double>(least))
    refuse_entry(key, "give a whole number from " + std::to_string(least));
  note(key, value->get<int64_t>());
  return value->get<int64_t>();
}
std::optional<bool> Settings::flag(const std::string& key) {
  const nlohmann::json* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) refuse_entry(key, "give true or false");
  note(key, *value);
  return value->get<bool>();
}
std::optional<std::string> Settings::text(const std::string& key) {
  const nlohmann::json* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) refuse_entry(key, "give a string");
  note(key, *value);
  return value->get<std::string>();
}
std::optional<std::vector<int64_t>> Settings::wholes(const std::string& key) {
  const nlohmann::json* const value = find(key);
  if (value == nullptr) return std::nullopt;
  const auto is_whole = [](const nlohmann::json& one) { return one.is_number_integer(); };
  if (!value->is_array() || !std::all_of(value->begin(), value->end(), is_whole))
    refuse_entry(key, "give a list of whole numbers");
  note(key, value->get<std::vector<int64_t>>());
  return value->get<std::vector<int64_t>>();
}
std::optional<Settings> Settings::part(const std::string& key, bool takes_name) {
  const nlohmann::json* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_string() && takes_name) return Settings(place(key), {{"type", *value}}, lines_);
  if (!value->is_object())
    refuse_entry(key, takes_name ? "give a name, or an object in braces" : "give an object in braces");
  return Settings(place(key), *value, lines_);
}
Settings Settings::part_or_empty(const std::string& key) {
  std::optional<Settings> found = part(key);
  return found ? *std::move(found) : Settings(place(key), nlohmann::json::object(), lines_);
}

double Settings::number(const std::string& key, double otherwise) {
  const std::optional<double> value = number(key);
  if (!value) note(key, otherwise);
  return value.value_or(otherwise);
}
int64_t Settings::whole(const std::string& key, int64_t least, int64_t otherwise) {
  const std::optional<int64_t> value = whole(key, least);
  if (!value) note(key, otherwise);
  return value.value_or(otherwise);
}
bool Settings::flag(const std::string& key, bool otherwise) {
  const std::optional<bool> value = flag(key);
  if (!value) note(key, otherwise);
  return value.value_or(otherwise);
}
std::string Settings::text(const std::string& key, const std::string& otherwise) {
  std::optional<std::string> value = text(key);
  if (!value) note(key, otherwise);
  return value ? *std::move(value) : otherwise;
}

double Settings::required_number(const std::string& key) {
  const std::optional<double> value = number(key);
  if (!value) refuse_missing(key);
  return *value;
}
int64_t Settings::required_whole(const std::string& key, int64_t least) {
  const std::optional<int64_t> value = whole(key, least);
  if (!value) refuse_missing(key);
  return *value;
}
std::string Settings::required_text(const std::string& key) {
  std::optional<std::string> value = text(key);
  if (!value) refuse_missing(key);
  return *std::move(value);
}

void Settings::finish() const {
  for (const auto& [key, value] : values_.items()) {
    if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
    std::string known;
    for (const std::string& one : known_) known += (known.empty() ? "" : ", ") + one;
    throw StatusError(LOCKSTEP_INVALID_ARGUMENT,
                      "the configuration's " + place(key).substr(0, 200) + " is not known there; known are " + known);
  }
}

}  // namespace lockstep::train_c
