#include "launch/run_record.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/file_descriptor.h"
#include "base/proc_file.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

constexpr size_t kMostBytes = 1 << 20;
constexpr size_t kMostRanks = 4096;

Json to_json(const ProcessIdentity& process) { return {{"pid", process.pid}, {"start_ticks", process.start_ticks}}; }

ProcessIdentity from_json(const Json& json) {
  return {json.at("pid").get<pid_t>(), json.at("start_ticks").get<uint64_t>()};
}

}  // namespace

ProcessIdentity identify(pid_t pid) {
  std::istringstream fields(process_stat(pid));
  std::string field;
  for (int number = 3; number <= 21; ++number) fields >> field;
  ProcessIdentity process{pid, 0};
  fields >> process.start_ticks;
  return process;
}

bool is_there(const ProcessIdentity& process) {
  return process.start_ticks != 0 && identify(process.pid).start_ticks == process.start_ticks;
}

RunRecord::RunRecord(const std::string& folder, const Contents& contents) : path_(folder + "/run.json") {
  Json json = {{"launcher", to_json(contents.launcher)}, {"board_fd", contents.board_fd}, {"ranks", Json::array()}};
  for (const auto& rank : contents.ranks) json["ranks"].push_back(to_json(rank));
  if (std::any_of(contents.hosts.begin(), contents.hosts.end(), [](const std::string& host) { return !host.empty(); }))
    json["hosts"] = contents.hosts;
  if (!contents.launch_command.empty()) json["launch_command"] = contents.launch_command;
  json["restarts"] = contents.restarts;
  if (contents.elastic) json["elastic"] = {{"min", contents.elastic->min}, {"max", contents.elastic->max}};
  const std::string bytes = json.dump(1) + "\n", partial = path_ + ".new";
  const FileDescriptor file(::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  const bool written = file && ::write(file.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size());
  if (!written || ::rename(partial.c_str(), path_.c_str()) != 0) ::unlink(partial.c_str());
}

RunRecord::~RunRecord() { ::unlink(path_.c_str()); }

RunRecord::Contents RunRecord::read(const std::string& folder) {
  std::ifstream file(folder + "/run.json", std::ios::binary);
  if (!file)
    throw Error("there is no " + folder +
                "/run.json: no run is active in this folder; give the folder of an active run, that of --log-dir or "
                "runs/<time>-<program>-<pid>; `lockstep status --all` lists them");
  std::string bytes(kMostBytes, '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  bytes.resize(static_cast<size_t>(file.gcount()));
  try {
    const Json json = Json::parse(bytes);
    Contents contents{.launcher = from_json(json.at("launcher")), .board_fd = json.at("board_fd").get<int>()};
    if (json.at("ranks").size() > kMostRanks) throw Error("it names too many ranks");
    for (const Json& rank : json.at("ranks")) contents.ranks.push_back(from_json(rank));
    if (json.contains("hosts")) contents.hosts = json["hosts"].get<std::vector<std::string>>();
    contents.hosts.resize(contents.ranks.size());
    // It will be executed, so only a file that this user has written counts.
    struct stat status {};
    if (::stat((folder + "/run.json").c_str(), &status) == 0 && status.st_uid == ::geteuid())
      contents.launch_command = json.value("launch_command", "");
    contents.restarts = json.at("restarts").get<int>();
    if (json.contains("elastic"))
      contents.elastic = {json["elastic"].at("min").get<int>(), json["elastic"].at("max").get<int>()};
    return contents;
  } catch (const std::exception& error) {
    throw Error(folder + "/run.json is not what `lockstep run` writes: " + error.what());
  }
}

}  // namespace lockstep
