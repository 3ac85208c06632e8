#include "launch/launch_error.h"

#include <cerrno>
#include <cstring>

#include "base/file_descriptor.h"

namespace lockstep {

void throw_limit(const std::string& what) {
  const int code = errno;
  try {
    if (code == EMFILE || code == ENFILE) throw_errno_or_limit(what);
  } catch (const LimitError& error) {
    throw LaunchError(kExitResourceLimit, error.what());
  }
  throw LaunchError(kExitResourceLimit, what + ": " + std::strerror(code));
}

void require_for_launch(size_t descriptors, const std::string& what) {
  try {
    require_descriptors(descriptors, what);
  } catch (const LimitError& error) {
    throw LaunchError(kExitResourceLimit, error.what());
  }
}

}  // namespace lockstep
