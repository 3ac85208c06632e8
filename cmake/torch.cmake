# Finds LibTorch: -DTorch_DIR, the place scripts/setup wrote down, or whatever CMAKE_PREFIX_PATH holds.

if(NOT Torch_DIR AND EXISTS ${PROJECT_SOURCE_DIR}/.setup/torch_dir)
  file(STRINGS ${PROJECT_SOURCE_DIR}/.setup/torch_dir lockstep_torch_dir LIMIT_COUNT 1)
  set(Torch_DIR ${lockstep_torch_dir} CACHE PATH "Folder of TorchConfig.cmake")
endif()
set(CMAKE_MESSAGE_LOG_LEVEL ERROR)  # its warnings about parts it was built without concern nobody here
find_package(Torch QUIET)
unset(CMAKE_MESSAGE_LOG_LEVEL)
option(LOCKSTEP_WITHOUT_TORCH "Configure where LibTorch is not there yet: the targets lockstep_cli and lockstep_c alone compile" OFF)
if(NOT Torch_FOUND AND LOCKSTEP_WITHOUT_TORCH)
  return()
endif()
if(NOT Torch_FOUND)
  message(FATAL_ERROR
    "LibTorch was not found. Run scripts/setup, or give -DTorch_DIR=<torch>/share/cmake/Torch "
    "(python3 -c 'import torch; print(torch.utils.cmake_prefix_path)' prints the folder above it).")
endif()
if(Torch_VERSION VERSION_LESS 2.11 OR Torch_VERSION VERSION_GREATER_EQUAL 2.16)
  message(FATAL_ERROR "Lockstep needs LibTorch 2.11 to 2.15; ${Torch_DIR} holds ${Torch_VERSION}.")
endif()
message(STATUS "LibTorch ${Torch_VERSION} in ${Torch_DIR}")
# Where what is installed here finds it. CMake's own INSTALL_RPATH_USE_LINK_PATH leaves out folders within the project,
# and LibTorch from the wheel lies in one: .venv.
set(LOCKSTEP_TORCH_RPATH $<TARGET_FILE_DIR:torch_cpu>)
