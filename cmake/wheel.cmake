# The component `wheel`, which scripts/wheel puts into the Python package: the C++ library as one shared object with its
# headers and its CMake package, the launcher, and what `lockstep tour` and `lockstep doctor` run. No other installation has it.

if(NOT library_type STREQUAL STATIC_LIBRARY OR LOCKSTEP_SANITIZE)
  return()
endif()

# Of the static library's objects: nothing is compiled again.
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/lockstep_wheel.cpp CONTENT "// All of it is in liblockstep.a.\n")
add_library(lockstep_wheel SHARED ${PROJECT_BINARY_DIR}/lockstep_wheel.cpp)
target_include_directories(lockstep_wheel INTERFACE $<INSTALL_INTERFACE:include>)
target_compile_features(lockstep_wheel INTERFACE cxx_std_20)
target_link_libraries(lockstep_wheel PUBLIC stdc++ PRIVATE $<LINK_LIBRARY:WHOLE_ARCHIVE,lockstep> INTERFACE Threads::Threads)
# What reads a .tar, from the static library: the shared one brings XML, ICU and seven more, 37 MB, into a wheel.
find_library(LOCKSTEP_STATIC_ARCHIVE libarchive.a)
mark_as_advanced(LOCKSTEP_STATIC_ARCHIVE)
if(LOCKSTEP_STATIC_ARCHIVE)
  target_link_libraries(lockstep_wheel PRIVATE ${LOCKSTEP_STATIC_ARCHIVE})
endif()
target_link_options(lockstep_wheel PRIVATE LINKER:--as-needed,--gc-sections,-z,nodelete
                    LINKER:--version-script=${PROJECT_SOURCE_DIR}/src/lockstep.map)
# In site-packages: lockstep/lib beside torch/lib.
set_target_properties(lockstep_wheel PROPERTIES OUTPUT_NAME lockstep EXPORT_NAME lockstep LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/wheel
                      INSTALL_RPATH "$ORIGIN/../../torch/lib" LINK_DEPENDS ${PROJECT_SOURCE_DIR}/src/lockstep.map)

set(library_type SHARED_LIBRARY)
set(targets_file LockstepWheelTargets)  # of one name and folder, CMake would write one file for both installations
set(wheel_config lib/cmake/Lockstep)
configure_package_config_file(cmake/LockstepConfig.cmake.in ${PROJECT_BINARY_DIR}/wheel/LockstepConfig.cmake INSTALL_DESTINATION ${wheel_config})
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/wheel/LockstepTorchHere.cmake @ONLY CONTENT
     "get_filename_component(lockstep_torch_dir \"\${CMAKE_CURRENT_LIST_DIR}/../../../../torch/share/cmake/Torch\" ABSOLUTE)\n")
install(TARGETS lockstep_wheel EXPORT LockstepWheelTargets LIBRARY DESTINATION lib COMPONENT wheel EXCLUDE_FROM_ALL)
install(EXPORT LockstepWheelTargets NAMESPACE Lockstep:: DESTINATION ${wheel_config} COMPONENT wheel EXCLUDE_FROM_ALL)
install(FILES ${PROJECT_BINARY_DIR}/wheel/LockstepConfig.cmake ${PROJECT_BINARY_DIR}/wheel/LockstepTorchHere.cmake
        ${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake DESTINATION ${wheel_config} COMPONENT wheel EXCLUDE_FROM_ALL)
install(DIRECTORY include/lockstep DESTINATION include COMPONENT wheel EXCLUDE_FROM_ALL PATTERN c.h EXCLUDE PATTERN mpi.h EXCLUDE)
install(TARGETS lockstep_cli DESTINATION bin COMPONENT wheel EXCLUDE_FROM_ALL)
install(TARGETS lockstep_tour lockstep_doctor_probe DESTINATION libexec/lockstep COMPONENT wheel EXCLUDE_FROM_ALL)
install(FILES LICENSE DESTINATION share/doc/lockstep RENAME copyright COMPONENT wheel EXCLUDE_FROM_ALL)
