#include "base/error.h"

#include <cerrno>
#include <cstring>

namespace lockstep {

void throw_errno(const std::string& what) {
  const int code = errno;
  throw Error(what + ": " + std::strerror(code));
}

}  // namespace lockstep
