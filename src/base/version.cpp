#include "base/version.h"

namespace lockstep {

const char* library_version() { return LOCKSTEP_VERSION; }

}  // namespace lockstep
