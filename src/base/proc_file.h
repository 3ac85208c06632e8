#pragma once

#include <string>

namespace lockstep {

/// The bytes of a file in /proc, as far as they can be read. A process may be gone between the opening and the reading
/// (ESRCH), for which a std::ifstream's iterator would throw. Empty: there is no such file, or it may not be read.
std::string read_proc_file(const std::string& path);

/// What /proc/<pid>/stat has behind the process's name, which may contain anything: its state, parent, group and so on,
/// with spaces between. Empty: there is no such process.
std::string process_stat(int pid);

}  // namespace lockstep
