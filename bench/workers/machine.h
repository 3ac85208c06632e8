#pragma once

#include <csignal>
#include <string>

#include <nlohmann/json.hpp>

namespace lockstep::bench {

/// A folder for sockets and output, gone at the end. Under /tmp, since a socket's path must be short.
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& name);
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// Processors this process may use.
int usable_cores();
/// The machine, for the head of a file of figures.
nlohmann::ordered_json host_facts();
/// The build folder this program lies in.
std::string build_folder();

/// From now on SIGINT and SIGTERM are remembered only, so that workers and sockets can be cleared away.
void remember_interrupts();
/// Throws std::runtime_error once one has come.
void check_interrupts();

}  // namespace lockstep::bench
