# Warnings, sanitizers, ccache and a fast linker where they are present. Nothing here is needed to build.

add_library(lockstep_warnings INTERFACE)
target_compile_options(lockstep_warnings INTERFACE -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wno-missing-field-initializers)

set(LOCKSTEP_SANITIZE "" CACHE STRING "Sanitizers of the whole build, e.g. address,undefined or thread")
if(LOCKSTEP_SANITIZE)
  add_compile_options(-fsanitize=${LOCKSTEP_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${LOCKSTEP_SANITIZE})
endif()

# x86-64's baseline has no fused multiply-add; where a processor has one, results must not depend on what is fused.
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  add_compile_options(-ffp-contract=off)
endif()

find_program(LOCKSTEP_CCACHE ccache)
if(LOCKSTEP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # A precompiled header can be cached only when ccache may trust its definitions and ignore its time stamps.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${LOCKSTEP_CCACHE})
  add_compile_options(-fpch-preprocess)
endif()

find_program(LOCKSTEP_MOLD mold)
if(LOCKSTEP_MOLD AND NOT CMAKE_CROSSCOMPILING)
  add_link_options(-fuse-ld=mold)
endif()

# Tests, examples and commands spend their time in the libraries: -O1 compiles them in half the time of a release's -O3.
function(lockstep_compile_quickly)
  foreach(target ${ARGN})
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  endforeach()
endfunction()
