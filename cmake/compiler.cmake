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

# lockstep_kernels(<target> <prefix> <options>): <prefix>_<instruction set>.cpp for each instruction set that the target's processor
# may have, with the options and its own. python/setup.py repeats the flags.
function(lockstep_kernels target prefix options)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    target_sources(${target} PRIVATE ${prefix}_avx2.cpp ${prefix}_avx512.cpp)
    target_compile_definitions(${target} PRIVATE LOCKSTEP_X86_KERNELS)
    set_source_files_properties(${prefix}_avx2.cpp PROPERTIES COMPILE_OPTIONS "${options};-mavx2;-mf16c")
    set_source_files_properties(${prefix}_avx512.cpp PROPERTIES COMPILE_OPTIONS
      "${options};-mavx2;-mf16c;-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mprefer-vector-width=512")
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
    target_sources(${target} PRIVATE ${prefix}_neon.cpp)
    target_compile_definitions(${target} PRIVATE LOCKSTEP_NEON_KERNELS)
    set_source_files_properties(${prefix}_neon.cpp PROPERTIES COMPILE_OPTIONS "${options}")
  endif()
endfunction()
