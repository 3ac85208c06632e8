# `cmake --install`: headers, the library, the launcher and find_package(Lockstep). What only fits this machine is the
# component `this_machine`, which packages leave out; without LibTorch the components `launcher` and `lockstep_c`
# can be installed.

install(TARGETS lockstep EXPORT LockstepTargets)
install(DIRECTORY include/lockstep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} PATTERN train_c.h EXCLUDE)

include(CMakePackageConfigHelpers)
set(config_folder ${CMAKE_INSTALL_LIBDIR}/cmake/Lockstep)
install(EXPORT LockstepTargets NAMESPACE Lockstep:: DESTINATION ${config_folder})
# Bound to one MPI, so packages leave it out.
if(TARGET lockstep_mpi)
  install(TARGETS lockstep_mpi EXPORT LockstepMpiTargets COMPONENT mpi)
  install(EXPORT LockstepMpiTargets NAMESPACE Lockstep:: DESTINATION ${config_folder} COMPONENT mpi)
endif()
get_target_property(library_type lockstep TYPE)
set(targets_file LockstepTargets)
configure_package_config_file(cmake/LockstepConfig.cmake.in ${PROJECT_BINARY_DIR}/LockstepConfig.cmake
                              INSTALL_DESTINATION ${config_folder})
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/LockstepTorchHere.cmake CONTENT "set(lockstep_torch_dir [==[@Torch_DIR@]==])\n" @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/LockstepTorchHere.cmake DESTINATION ${config_folder} COMPONENT this_machine)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/LockstepConfig.cmake ${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake
        DESTINATION ${config_folder})

# liblockstep_c, which needs none of this: by itself with `cmake --install build --component lockstep_c`.
install(TARGETS lockstep_c EXPORT LockstepCTargets COMPONENT lockstep_c)
install(FILES include/lockstep/c.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep COMPONENT lockstep_c)
set(c_config_folder ${CMAKE_INSTALL_LIBDIR}/cmake/LockstepC)
install(EXPORT LockstepCTargets NAMESPACE LockstepC:: DESTINATION ${c_config_folder} FILE LockstepCConfig.cmake COMPONENT lockstep_c)
get_target_property(c_version lockstep_c VERSION)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/LockstepCConfigVersion.cmake VERSION ${c_version} COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/LockstepCConfigVersion.cmake DESTINATION ${c_config_folder} COMPONENT lockstep_c)
# The prefix is where the file lies, so that an installation can be moved.
file(RELATIVE_PATH c_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/lockstep_c.pc.in ${PROJECT_BINARY_DIR}/lockstep_c.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/lockstep_c.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT lockstep_c)

# liblockstep_train, which has LibTorch inside, after a build of that target: `cmake --install build --component lockstep_train`.
# For one MPI: the component `mpi`.
install(TARGETS lockstep_train EXPORT LockstepTrainTargets COMPONENT lockstep_train EXCLUDE_FROM_ALL)
install(FILES include/lockstep/c.h include/lockstep/train_c.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep COMPONENT lockstep_train EXCLUDE_FROM_ALL)
set(train_config_folder ${CMAKE_INSTALL_LIBDIR}/cmake/LockstepTrain)
install(EXPORT LockstepTrainTargets NAMESPACE LockstepTrain:: DESTINATION ${train_config_folder} FILE LockstepTrainConfig.cmake
        COMPONENT lockstep_train EXCLUDE_FROM_ALL)
get_target_property(train_version lockstep_train VERSION)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/LockstepTrainConfigVersion.cmake VERSION ${train_version} COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/LockstepTrainConfigVersion.cmake DESTINATION ${train_config_folder} COMPONENT lockstep_train EXCLUDE_FROM_ALL)
configure_file(cmake/lockstep_train.pc.in ${PROJECT_BINARY_DIR}/lockstep_train.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/lockstep_train.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT lockstep_train EXCLUDE_FROM_ALL)
if(TARGET lockstep_train_mpi)
  install(TARGETS lockstep_train_mpi COMPONENT mpi OPTIONAL)
endif()

# What is linked, for those who must know it: a CycloneDX bill of materials of the files that were just installed.
if(library_type STREQUAL STATIC_LIBRARY)
  set(lockstep_file liblockstep.a)
else()
  set(lockstep_file liblockstep.so.${PROJECT_VERSION})
endif()
find_package(OpenSSL 3.0 REQUIRED)  # of lockstep_hosts
configure_file(cmake/sbom.cmake.in ${PROJECT_BINARY_DIR}/sbom.cmake @ONLY)
install(SCRIPT ${PROJECT_BINARY_DIR}/sbom.cmake COMPONENT sbom)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/lockstep RENAME copyright COMPONENT launcher)
