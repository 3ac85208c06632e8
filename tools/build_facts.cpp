#include "build_facts.h"

// CMake makes the definitions (tools/CMakeLists.txt).
namespace lockstep {

const char* build_facts() {
  return "lockstep " LOCKSTEP_VERSION
         "\n"
         "built: " LOCKSTEP_BUILT_BY
         "\n"
         "LibTorch: " LOCKSTEP_BUILT_WITH_TORCH
         "\n"
         "engines: " LOCKSTEP_ENGINES;
}

}  // namespace lockstep
