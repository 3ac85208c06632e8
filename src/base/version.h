#pragma once

namespace lockstep {

/// "0.1.0": of this library, which may be another than the launcher's.
const char* library_version();

}  // namespace lockstep
