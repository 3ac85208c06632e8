#include "base/machine_name.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <fstream>

#include "base/environment.h"

namespace lockstep {

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

std::string machine_name() {
  char space[64] = {};
  const ssize_t length = ::readlink("/proc/self/ns/net", space, sizeof space - 1);
  std::string name = host_name() + "/" + boot_id() + "/" + std::string(space, length > 0 ? length : 0) + "/" +
                     Environment::from_process().lockstep_machine.value_or("");
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isspace(c) != 0; }, '_');
  return name;
}

}  // namespace lockstep
