#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "base/file_descriptor.h"

namespace lockstep {

/// Process-wide settings of the launcher, in effect while this object lives. It blocks the signals that it reads from
/// signal_fd(), ignores signals of failing writes, raises the descriptor limit, and adopts the processes that its ranks
/// leave behind, to reap them at the end (not every container has an init that does). Children get the old settings
/// back.
class LauncherSettings {
 public:
  LauncherSettings();
  ~LauncherSettings();
  LauncherSettings(const LauncherSettings&) = delete;
  LauncherSettings& operator=(const LauncherSettings&) = delete;

  int signal_fd() const { return signal_fd_.get(); }
  /// The next signal that has arrived, or 0.
  int next_signal() const;
  /// Also safe in a child between fork and exec.
  void restore() const;

 private:
  sigset_t mask_;
  struct sigaction broken_pipe_, file_too_large_, child_;
  rlimit descriptors_;
  FileDescriptor signal_fd_;
};

struct ProcessStart {
  std::string program;                      ///< path to execute
  std::vector<std::string> arguments;       ///< argv, starting with the program's name
  std::vector<std::string> environment;     ///< NAME=value
  std::vector<int> cpus;                    ///< CPUs on which it may run; empty: the launcher's
  int memory_node = -1;                     ///< the node whose memory it takes first, if the kernel allows it; -1: any
  int input = -1, output = -1, error = -1;  ///< become its descriptors 0, 1 and 2
  int announce = -1;                        ///< the descriptor to which it writes its pid, as a pid_t, before exec
  std::vector<int> kept;                    ///< descriptors that stay open under their numbers
  bool ignore_suspend = false;              ///< Ctrl-Z does not stop it, since nobody could continue it
};

/// The way a process ended.
struct ProcessEnd {
  enum class Kind {
    kExited,      ///< value: the exit code
    kSignalled,   ///< value: the signal
    kNotStarted,  ///< value: the errno of exec or of a call before it
    kLost,        ///< its machine is out of reach, and its end is unknown
  };
  Kind kind = Kind::kExited;
  int value = 0;

  bool failed() const { return kind != Kind::kExited || value != 0; }
  bool operator==(const ProcessEnd&) const = default;
};

/// A child in its own process group, killed when the launcher's process ends. After its end the child stays a zombie
/// until this object is destroyed, so its pid, which is also its group's, cannot be reused.
class Process {
 public:
  /// Returns before it is known whether the program starts; end() reports that. Throws LaunchError if the system allows
  /// no more processes or descriptors.
  Process(const ProcessStart& start, const LauncherSettings& settings);
  /// Kills the rest of the group.
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  /// Readable when the process has ended.
  int pidfd() const { return pidfd_.get(); }
  /// Its end; empty while it runs.
  std::optional<ProcessEnd> end();
  /// Its peak resident memory, after its end. 0: unknown.
  uint64_t peak_bytes() const { return peak_bytes_; }
  /// Signals the process and its whole group.
  void signal_group(int signal) const;
  /// Whether the group is empty. Reaps the ended process.
  /// REQUIRES: a last SIGKILL has been sent.
  bool group_is_gone();

 private:
  pid_t pid_ = -1;
  bool reaped_ = false;
  FileDescriptor pidfd_;
  std::optional<ProcessEnd> end_;
  uint64_t peak_bytes_ = 0;
  FileDescriptor failure_;  // receives an errno if exec fails, end of file if it succeeds
};

}  // namespace lockstep
