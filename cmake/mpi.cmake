# Lockstep::mpi, for programs that use MPI themselves (include/lockstep/mpi.h). It is compiled against one MPI: the one
# that find_package(MPI) finds (-DMPI_CXX_COMPILER=mpicxx.mpich chooses another). liblockstep itself does not know MPI.

set(LOCKSTEP_MPI AUTO CACHE STRING "Build Lockstep::mpi: AUTO (where an MPI is found), ON or OFF")
set_property(CACHE LOCKSTEP_MPI PROPERTY STRINGS AUTO ON OFF)

# lockstep_mpi_library(<name> <target that has mpi.h>): what of Lockstep knows MPI, compiled against that one.
function(lockstep_mpi_library name mpi)
  add_library(${name} ${PROJECT_SOURCE_DIR}/src/collectives/mpi/mpi_port.cpp ${PROJECT_SOURCE_DIR}/src/context/mpi_context.cpp)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  # The C++ bindings that MPI has given up are declared by default.
  target_compile_definitions(${name} PRIVATE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
  target_link_libraries(${name} PUBLIC lockstep ${mpi} PRIVATE $<BUILD_INTERFACE:lockstep_warnings>)
  set_target_properties(${name} PROPERTIES UNITY_BUILD_BATCH_SIZE 0)
  lockstep_reuse_pch(${name})
endfunction()

if(LOCKSTEP_MPI STREQUAL "OFF" OR NOT Torch_FOUND)
  return()
endif()
set(MPI_CXX_SKIP_MPICXX ON)
find_package(MPI QUIET COMPONENTS CXX)
if(NOT MPI_CXX_FOUND)
  if(LOCKSTEP_MPI STREQUAL "ON")
    message(FATAL_ERROR "LOCKSTEP_MPI is ON, but no MPI was found; install one (Debian: libopenmpi-dev or libmpich-dev), or give -DMPI_CXX_COMPILER=<mpicxx>.")
  endif()
  return()
endif()
lockstep_mpi_library(lockstep_mpi MPI::MPI_CXX)
set_target_properties(lockstep_mpi PROPERTIES EXPORT_NAME mpi)
# Which one it is, for the tests, if it is one of the two that they know.
set(LOCKSTEP_MPI_KIND "")
foreach(kind openmpi mpich)
  if("${MPI_CXX_LIBRARIES}" MATCHES "${kind}")
    set(LOCKSTEP_MPI_KIND ${kind})
  endif()
endforeach()
add_library(Lockstep::mpi ALIAS lockstep_mpi)

# liblockstep_train with the functions that take a communicator.
lockstep_train_library(lockstep_train_mpi lockstep_mpi with_mpi.cpp)
