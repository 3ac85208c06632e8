# LibTorch of .setup/aarch64 (scripts/setup --aarch64), as far as CPUs use it. The package that its wheel has asks for CUDA's
# toolkit, since the package index has only a wheel for CUDA.

set(lockstep_torch ${LOCKSTEP_AARCH64_ROOT}/torch)
if(NOT EXISTS ${lockstep_torch}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "${LOCKSTEP_AARCH64_ROOT} holds no LibTorch for aarch64; scripts/setup --aarch64 downloads one.")
endif()
include(${lockstep_torch}/share/cmake/Torch/TorchConfigVersion.cmake)
set(Torch_VERSION ${PACKAGE_VERSION})
foreach(library torch_cpu c10)
  add_library(${library} SHARED IMPORTED)
  set_target_properties(${library} PROPERTIES
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO"
    IMPORTED_LOCATION ${lockstep_torch}/lib/lib${library}.so
    INTERFACE_INCLUDE_DIRECTORIES "${lockstep_torch}/include;${lockstep_torch}/include/torch/csrc/api/include")
endforeach()
set(TORCH_LIBRARIES torch_cpu c10)
