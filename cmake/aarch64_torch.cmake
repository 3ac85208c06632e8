# Toolchain file: as cmake/aarch64.cmake, with LibTorch and Debian's libraries for aarch64 from .setup/aarch64
# (scripts/setup --aarch64).

include(${CMAKE_CURRENT_LIST_DIR}/aarch64.cmake)
get_filename_component(LOCKSTEP_AARCH64_ROOT ${CMAKE_CURRENT_LIST_DIR}/../.setup/aarch64 ABSOLUTE)
set(CMAKE_FIND_ROOT_PATH ${LOCKSTEP_AARCH64_ROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_CXX_STANDARD_INCLUDE_DIRECTORIES ${LOCKSTEP_AARCH64_ROOT}/usr/include/aarch64-linux-gnu)  # jconfig.h, opensslconf.h
# What those libraries need in turn.
set(CMAKE_EXE_LINKER_FLAGS_INIT "")
foreach(folder usr/lib/aarch64-linux-gnu lib/aarch64-linux-gnu torch/lib nvidia/cu13/lib)
  string(APPEND CMAKE_EXE_LINKER_FLAGS_INIT " -Wl,-rpath-link,${LOCKSTEP_AARCH64_ROOT}/${folder}")
endforeach()
if(LOCKSTEP_QEMU)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${LOCKSTEP_QEMU} -L ${LOCKSTEP_AARCH64_ROOT})
endif()
