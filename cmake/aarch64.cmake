# Toolchain file: Debian's cross compiler for aarch64 (g++-aarch64-linux-gnu), and qemu-user for what is run meanwhile.
# Headers that suit every processor (nlohmann-json) are the machine's own; libraries are only the target's.

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
find_program(LOCKSTEP_QEMU qemu-aarch64)
mark_as_advanced(LOCKSTEP_QEMU)
if(LOCKSTEP_QEMU)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${LOCKSTEP_QEMU} -L /usr/aarch64-linux-gnu)
endif()
