# `cpack` in the build folder: a .deb and a .tar.gz. They hold what depends on no place of this machine: the launcher with
# its manual and completions, liblockstep_c, and the C++ library for the LibTorch of whoever installs them.

set(CPACK_PACKAGE_NAME lockstep)
set(CPACK_PACKAGE_VENDOR "The Lockstep authors")
set(CPACK_PACKAGE_CONTACT "The Lockstep authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY ${PROJECT_DESCRIPTION})
set(CPACK_PACKAGE_DESCRIPTION "The launcher `lockstep` and liblockstep_c need nothing but the C++ runtime. The C++ library, its headers and its
CMake package are for programs on LibTorch ${Torch_VERSION}, which is not part of this package.")
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_BINARY_DIR}/packages)
set(CPACK_STRIP_FILES ON)
set(CPACK_VERBATIM_VARIABLES ON)

set(CPACK_COMPONENTS_ALL launcher lockstep lockstep_c sbom)
set(CPACK_PROJECT_CONFIG_FILE ${CMAKE_CURRENT_LIST_DIR}/package_options.cmake)
set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
set(CPACK_ARCHIVE_COMPONENT_INSTALL ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)

set(CPACK_GENERATOR TGZ)
find_program(LOCKSTEP_SHLIBDEPS dpkg-shlibdeps)
mark_as_advanced(LOCKSTEP_SHLIBDEPS)
# No Debian package has the LibTorch that a shared library would depend on.
if(LOCKSTEP_SHLIBDEPS AND NOT BUILD_SHARED_LIBS)
  list(APPEND CPACK_GENERATOR DEB)
endif()
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_NAME lockstep)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "g++, cmake, zlib1g-dev, libarchive-dev, libjpeg-dev, libpng-dev")
# ldconfig after liblockstep_c came or went.
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY =)
include(CPack)
