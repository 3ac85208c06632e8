#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "observe/events/event_encoding.h"
#include "observe/growing_file.h"

namespace lockstep {

/// Seconds since 1970, for people and for other programs; never for durations.
double wall_seconds();

/// One event file in a TensorBoard folder. Its name is unique: seconds since 1970, host, process and a count
/// distinguish and order files. Throws Error if folder or file cannot be made, unless only space is missing.
class EventFile {
 public:
  EventFile(const std::string& folder, const std::string& suffix, std::chrono::milliseconds flush_interval);

  void write(std::string_view event);
  void flush() { file_->flush(); }
  const std::string& folder() const { return folder_; }
  const std::string& path() const { return file_->path(); }

 private:
  std::string folder_;
  std::unique_ptr<GrowingFile> file_;
  std::string record_;
};

}  // namespace lockstep
