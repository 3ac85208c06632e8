"""Builds lockstep._C from the sources of the C++ library, against the torch that is installed."""

import glob
import os
import platform

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(os.path.dirname(HERE), "src")
INCLUDES = [SOURCE, os.path.join(os.path.dirname(HERE), "include")]

# As in the CMakeLists.txt of src/base, src/rank_page and src/collectives/shm.
CORE = ["base/descriptor_limit", "base/environment", "base/error", "base/file_descriptor", "base/rank_names", "base/shared_segment", "base/usable_cores", "rank_page/rank_board", "rank_page/rank_page"]
CORE_FLAGS = ["-std=c++20", "-O3", "-g0", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
AVX2 = ["-mavx2", "-mf16c"]
AVX512 = AVX2 + ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
X86 = platform.machine() in ("x86_64", "AMD64")


def core_sources():
    """(file, its own flags) of everything that does not know torch."""
    for name in CORE:
        yield os.path.join(SOURCE, name + ".cpp"), []
    for path in sorted(glob.glob(os.path.join(SOURCE, "collectives/shm/*.cpp"))):
        kernels = {"reduce_avx2.cpp": AVX2, "reduce_avx512.cpp": AVX512}.get(os.path.basename(path))
        if kernels is None or X86:
            yield path, (kernels or []) + (["-DLOCKSTEP_X86_KERNELS"] if X86 else [])


class Build(BuildExtension):
    def build_extensions(self):
        extension = self.extensions[0]
        objects = os.path.join(self.build_temp, "core", "objects")
        os.makedirs(objects, exist_ok=True)  # the names begin with "..", so the folder must exist
        # An extension has one set of flags, but the kernels need their own; and nothing here needs torch's headers.
        for path, flags in core_sources():
            extension.extra_objects += self.compiler.compile(
                [os.path.relpath(path, os.getcwd())], output_dir=objects,
                include_dirs=INCLUDES, extra_postargs=CORE_FLAGS + flags)
        extension.sources = [self.all_in_one()]
        super().build_extensions()

    def all_in_one(self):
        """Reading torch's headers takes most of the time, so the files that include them are compiled as one."""
        path = os.path.abspath(os.path.join(self.build_temp, "all.cpp"))
        parts = sorted(glob.glob(os.path.join(SOURCE, "collectives/shm/backend/*.cpp")))
        text = "".join(f'#include "{part}"\n' for part in parts + [os.path.join(HERE, "module.cpp")])
        if not os.path.exists(path) or open(path).read() != text:
            os.makedirs(self.build_temp, exist_ok=True)
            with open(path, "w") as file:
                file.write(text)
        return path


setup(
    ext_modules=[CppExtension("lockstep._C", ["module.cpp"], include_dirs=INCLUDES,
                              extra_compile_args=["-std=c++20", "-O3", "-g0", "-DNDEBUG", "-fvisibility=hidden"])],
    cmdclass={"build_ext": Build},
)
