#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// The readable bytes of a file in /proc; empty if there is no such file or it may not be read. A process may end
/// between open and read (ESRCH), where a std::ifstream's iterator would throw.
std::string read_proc_file(const std::string& path);

/// The value of the first line "key<separator>value" in the text of such a file, without surrounding blanks and quotes.
/// Empty if none.
std::string value_in(const std::string& text, const std::string& key, char separator);

/// The fields of /proc/<pid>/stat after the process name (which may contain anything): state, parent, group and so on,
/// separated by spaces. Empty if there is no such process.
std::string process_stat(int pid);

/// A cgroup of this process.
struct Cgroup {
  std::string path;
  std::string controllers;  ///< ",cpu,cpuacct,"; of version 2: ",,"
  bool is_v2() const { return controllers == ",,"; }
  bool has(const std::string& controller) const { return controllers.find("," + controller + ",") != controllers.npos; }
};
/// From /proc/self/cgroup below `root`, which is for tests.
std::vector<Cgroup> own_cgroups(const std::string& root = "");

}  // namespace lockstep
