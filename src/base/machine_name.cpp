#include "base/machine_name.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <fstream>

#include "base/environment.h"

namespace lockstep {

std::string machine_name() {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  char space[64] = {};
  const ssize_t length = ::readlink("/proc/self/ns/net", space, sizeof space - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::string name = std::string(host) + "/" + boot + "/" + std::string(space, length > 0 ? length : 0) + "/" +
                     Environment::from_process().lockstep_machine.value_or("");
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isspace(c) != 0; }, '_');
  return name;
}

}  // namespace lockstep
