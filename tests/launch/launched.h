#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "support/temporary_folder.h"

namespace lockstep {

std::string read_file(const std::filesystem::path& path);

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Polls `condition` until it holds; false when the time is over.
bool eventually(const std::function<bool()>& condition,
                std::chrono::milliseconds timeout = std::chrono::milliseconds(10000));

/// `lockstep run ARGS`, started in a folder of its own. All its processes carry a mark in their environment, so that
/// they are found whatever happens to them. Nothing here waits for ever; whatever is left is killed in the end.
class Launched {
 public:
  struct Options {
    std::string input;                     ///< for stdin
    std::vector<std::string> environment;  ///< NAME=value, besides PATH
    std::string before;                    ///< shell commands to run first, in the launcher's place
    bool terminal = false;                 ///< on a terminal of its own, instead of pipes
  };
  struct Result {
    int exit_code = -1;  ///< minus the signal where one killed it
    std::string out, err;
    double seconds = 0;
  };

  explicit Launched(const std::vector<std::string>& arguments) : Launched(arguments, Options()) {}
  Launched(const std::vector<std::string>& arguments, Options options);
  ~Launched();

  /// Reads the output until the launcher has ended; kills it when the time is over.
  Result wait(std::chrono::milliseconds timeout = std::chrono::seconds(20));
  /// Waits until `text` has been printed; false if it was not.
  bool wait_for(const std::string& text);
  void type(const std::string& text);
  void stop_reading() { out_.reset(); }

  pid_t pid() const { return pid_; }
  const std::filesystem::path& folder() const { return folder_.path(); }
  /// A rank's log in the run folder given as --run-dir run, without the times before its lines.
  std::string log(int rank) const;
  /// The same, unchanged.
  std::string stamped_log(int rank) const;
  /// The marked processes that are still alive.
  std::vector<pid_t> processes() const;

 private:
  void read_some(int timeout_ms);

  TemporaryFolder folder_;
  std::string mark_;
  FileDescriptor in_, out_, err_;
  pid_t pid_ = -1;
  std::string pending_input_;
  Result result_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace lockstep
