#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace lockstep {

/// The TCP ports on which a process listens.
inline std::vector<int> listening_ports(pid_t pid) {
  const std::string folder = "/proc/" + std::to_string(pid);
  std::set<unsigned long> inodes;
  std::error_code gone;
  for (const auto& entry : std::filesystem::directory_iterator(folder + "/fd", gone)) {
    struct stat file {};
    if (::stat(entry.path().c_str(), &file) == 0 && S_ISSOCK(file.st_mode)) inodes.insert(file.st_ino);
  }
  std::vector<int> ports;
  for (const char* family : {"tcp", "tcp6"}) {
    std::ifstream table(folder + "/net/" + family);
    std::string line;
    while (std::getline(table, line)) {
      std::istringstream words(line);
      std::string slot, local, remote, state, queues, timer, retransmits, uid, timeout;
      unsigned long inode = 0;
      words >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> uid >> timeout >> inode;
      if (state == "0A" && inodes.contains(inode))
        ports.push_back(std::stoi(local.substr(local.find(':') + 1), nullptr, 16));
    }
  }
  return ports;
}

}  // namespace lockstep
