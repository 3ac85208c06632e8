#include "base/proc_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "base/file_descriptor.h"
#include "base/text.h"

namespace lockstep {

std::string read_proc_file(const std::string& path) {
  std::string bytes;
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return bytes;
  char piece[4096];
  for (;;) {
    const ssize_t count = ::read(file.get(), piece, sizeof piece);
    if (count > 0)
      bytes.append(piece, static_cast<size_t>(count));
    else if (count == 0 || errno != EINTR)
      return bytes;
  }
}

std::string value_in(const std::string& text, const std::string& key, char separator) {
  for (const std::string& line : lines_of(text)) {
    const size_t at = line.find(separator);
    if (at == std::string::npos || line.substr(0, line.find_last_not_of(" \t", at - 1) + 1) != key) continue;
    std::string value = line.substr(at + 1);
    value.erase(0, value.find_first_not_of(" \t\""));
    return value.substr(0, value.find_last_not_of("\" \t") + 1);
  }
  return "";
}

std::vector<Cgroup> own_cgroups(const std::string& root) {
  std::vector<Cgroup> groups;
  for (const std::string& line : lines_of(read_proc_file(root + "/proc/self/cgroup"))) {
    const size_t controllers = line.find(':') + 1, path = line.find(':', controllers) + 1;
    if (controllers == 0 || path == 0 || path == line.size()) continue;
    groups.push_back({line.substr(path), "," + line.substr(controllers, path - controllers - 1) + ","});
  }
  return groups;
}

std::string process_stat(int pid) {
  const std::string stat = read_proc_file("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(')');
  return name_end == std::string::npos ? "" : stat.substr(name_end + 1);
}

}  // namespace lockstep
