# In a Spack repository: packages/lockstep/package.py.
from spack.package import *


class Lockstep(CMakePackage):
    """Distributed data-parallel training for C++ on stock LibTorch: a library, a launcher, and collectives for C."""

    maintainers = []
    license("BSD-3-Clause")

    # `spack dev-build lockstep@0.1.0` in the folder of the sources, until there is a release to fetch.
    version("0.1.0")

    variant("torch", default=True, description="Build the C++ library, which needs LibTorch")
    variant("shared", default=True, description="Build liblockstep.so rather than liblockstep.a", when="+torch")

    depends_on("cxx", type="build")
    depends_on("cmake@3.25:", type="build")
    depends_on("ninja", type="build")
    depends_on("cli11@2.1:", type="build")
    depends_on("nlohmann-json@3.9:", type="build")
    depends_on("protozero", type="build")
    depends_on("zlib-api")
    depends_on("libarchive")
    depends_on("jpeg")
    depends_on("libpng")
    depends_on("py-torch@2.11:2.15", when="+torch", type=("build", "link", "run"))

    requires("target=x86_64:")
    conflicts("%gcc@:11", msg="Lockstep needs g++ 12 or newer")

    generator("ninja")

    def cmake_args(self):
        args = [
            self.define("LOCKSTEP_BUILD_TESTS", False),
            self.define("LOCKSTEP_BUILD_EXAMPLES", False),
            self.define("LOCKSTEP_BUILD_BENCH", False),
            self.define("LOCKSTEP_WITHOUT_TORCH", self.spec.satisfies("~torch")),
        ]
        if self.spec.satisfies("+torch"):
            torch = join_path(self.spec["py-torch"].package.module.python_platlib, "torch")
            args.append(self.define("Torch_DIR", join_path(torch, "share", "cmake", "Torch")))
            args.append(self.define_from_variant("BUILD_SHARED_LIBS", "shared"))
        return args

    @property
    def build_targets(self):
        return [] if self.spec.satisfies("+torch") else ["lockstep_cli", "lockstep_tour", "lockstep_c"]

    def install(self, spec, prefix):
        components = [] if spec.satisfies("+torch") else ["launcher", "lockstep_c"]
        with working_dir(self.build_directory):
            for component in components:
                cmake("--install", ".", "--prefix", prefix, "--component", component)
            if not components:
                cmake("--install", ".", "--prefix", prefix)
