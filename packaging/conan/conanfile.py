import os

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain
from conan.tools.files import copy

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


class LockstepRecipe(ConanFile):
    name = "lockstep"
    version = "0.1.0"
    license = "BSD-3-Clause"
    description = "Distributed data-parallel training for C++ on stock LibTorch"
    topics = ("distributed-training", "libtorch", "collectives")
    package_type = "library"
    settings = "os", "compiler", "build_type", "arch"
    # with_torch needs -c tools.cmake.cmaketoolchain:extra_variables="{'Torch_DIR': '<torch>/share/cmake/Torch'}".
    options = {"with_torch": [True, False], "shared": [True, False], "fPIC": [True, False]}
    default_options = {"with_torch": False, "shared": False, "fPIC": True}

    def export_sources(self):
        for folder in ("bench", "cmake", "include", "src", "tools"):
            copy(self, "*", os.path.join(ROOT, folder), os.path.join(self.export_sources_folder, folder))
        for name in ("CMakeLists.txt", "LICENSE"):
            copy(self, name, ROOT, self.export_sources_folder)

    def requirements(self):
        self.requires("zlib/[>=1.2.11 <2]")
        self.requires("nlohmann_json/[>=3.9]")
        self.requires("cli11/[>=2.1]")
        self.requires("protozero/[>=1.7]")
        self.requires("libarchive/[>=3.6]")
        self.requires("libjpeg/[>=9]")
        self.requires("libpng/[>=1.6]")

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["LOCKSTEP_WITHOUT_TORCH"] = not self.options.with_torch
        for what in ("TESTS", "EXAMPLES", "BENCH"):
            toolchain.cache_variables["LOCKSTEP_BUILD_" + what] = False
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        for target in [None] if self.options.with_torch else ["lockstep_cli", "lockstep_tour", "lockstep_c"]:
            cmake.build(target=target)

    def package(self):
        cmake = CMake(self)
        for component in [None] if self.options.with_torch else ["launcher", "lockstep_c"]:
            cmake.install(component=component)

    def package_info(self):
        # The CMake packages that Lockstep installs know more than Conan could be told.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("lib", "cmake")]
        self.runenv_info.append_path("PATH", os.path.join(self.package_folder, "bin"))
