#pragma once

// Every public header includes this one before anything that only C++20 has, so that an older standard is told in one
// sentence. The second directive ends the compilation there: without it, hundreds of errors would follow the sentence.
#if __cplusplus < 202002L
#error "Lockstep needs C++20: compile with -std=c++20, in CMake target_compile_features(<target> PRIVATE cxx_std_20)."
#include <lockstep needs C++20: compile with -std=c++20>
#endif
