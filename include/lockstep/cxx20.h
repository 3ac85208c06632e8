#pragma once

// Every public header includes this one before anything that only C++20 has, so that an older standard gets a
// one-sentence error. The second directive ends the compilation: without it, hundreds of errors would follow.
#if __cplusplus < 202002L
#error "Lockstep needs C++20: compile with -std=c++20, in CMake target_compile_features(<target> PRIVATE cxx_std_20)."
#include <lockstep needs C++20: compile with -std=c++20>
#endif
