#pragma once

#include <string>

namespace lockstep {

/// The bytes of a file in /proc, as far as they can be read. A process may be gone between the opening and the reading
/// (ESRCH), for which a std::ifstream's iterator would throw. Empty: there is no such file, or it may not be read.
std::string read_proc_file(const std::string& path);

/// The value of the first line "key<separator>value" of such a file's text, without the blanks and quotes around it.
/// Empty: there is none.
std::string value_in(const std::string& text, const std::string& key, char separator);

/// The fields of /proc/<pid>/stat after the process name (which may contain anything): state, parent, group and so on,
/// separated by spaces. Empty if there is no such process.
std::string process_stat(int pid);

}  // namespace lockstep
