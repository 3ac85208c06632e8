#pragma once

namespace lockstep {

/// This library's version, "0.1.0", which may differ from the launcher's.
const char* library_version();

}  // namespace lockstep
