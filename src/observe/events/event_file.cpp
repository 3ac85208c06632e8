#include "observe/events/event_file.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>

#include "base/error.h"
#include "base/machine_name.h"

namespace lockstep {
namespace {

std::string new_name() {
  static std::atomic<int> count = 0;
  std::string host = host_name();
  if (host.empty()) host = "host";
  std::array<char, 400> name{};
  std::snprintf(name.data(), name.size(), "events.out.tfevents.%010lld.%s.%d.%d",
                static_cast<long long>(wall_seconds()), host.c_str(), static_cast<int>(::getpid()), count++);
  return name.data();
}

}  // namespace

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

EventFile::EventFile(const std::string& folder, const std::string& suffix, std::chrono::milliseconds flush_interval)
    : folder_(folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw StorageError("cannot make the folder " + folder + " for event files: " + error.message());
  file_ = std::make_unique<GrowingFile>((std::filesystem::path(folder) / (new_name() + suffix)).string(),
                                        "the event file", flush_interval);
  write(version_event(wall_seconds()));
}

void EventFile::write(std::string_view event) {
  record_.clear();
  append_record(record_, event);
  file_->append(record_);
}

}  // namespace lockstep
