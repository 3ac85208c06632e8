"""Builds lockstep._C from the sources of the C++ library, against the torch that is installed."""

import glob
import os
import platform
import re

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(os.path.dirname(HERE), "src")
INCLUDES = [SOURCE, os.path.join(os.path.dirname(HERE), "include"), os.path.join(SOURCE, "collectives/gloo/headers")]

with open(os.path.join(HERE, "pyproject.toml"), encoding="utf-8") as project:
    VERSION = re.search(r'(?m)^version = "(.+)"', project.read()).group(1)

LIBRARY = os.environ.get("LOCKSTEP_LIBRARY")  # liblockstep.a of a CMake build with the same torch: what it holds is not built again

# As in the CMakeLists.txt of these folders: everything that knows no torch, ...
CORE = ["base", "rank_page", "rendezvous", "collectives/shm/kernels", "collectives/shm/segment",
        "collectives/shm/protocol", "optim/kernels"]
# ... and what does; the files of one line are compiled as one, since reading torch's headers takes most of the time.
TORCH = [["collectives", "collectives/single", "collectives/shm/backend", "collectives/gloo", "collectives/hierarchical"],
         ["reducer", "reducer/hooks/all_reduce_hook"], ["data_parallel", "nn"], ["optim", "checkpoint/group_options", "checkpoint/optimizer_kind", "checkpoint/sliced_memory"]]
CORE_FLAGS = ["-std=c++20", "-O3", "-g0", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
AVX2 = ["-mavx2", "-mf16c"]
AVX512 = AVX2 + ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
X86 = platform.machine() in ("x86_64", "AMD64")
KERNELS = {"avx2.cpp": AVX2, "avx512.cpp": AVX512} if X86 else {"neon.cpp": []} if platform.machine() in ("aarch64", "arm64") else {}
DEFINED = ["-DLOCKSTEP_X86_KERNELS"] if X86 else ["-DLOCKSTEP_NEON_KERNELS"] if KERNELS else []
DEFINED = [*DEFINED, f'-DLOCKSTEP_VERSION="{VERSION}"']


def files_of(name):
    """Of a folder of src, or of one file."""
    path = os.path.join(SOURCE, name)
    return sorted(glob.glob(os.path.join(path, "*.cpp"))) if os.path.isdir(path) else [path + ".cpp"]


def core_sources():
    """(file, its own flags) of everything that does not know torch."""
    for path in (path for name in CORE for path in files_of(name)):
        kind = path.rsplit("_", 1)[-1]
        if kind in KERNELS or kind not in ("avx2.cpp", "avx512.cpp", "neon.cpp"):
            yield path, KERNELS.get(kind, []) + DEFINED


class Build(BuildExtension):
    def build_extensions(self):
        extension = self.extensions[0]
        if LIBRARY:
            extension.extra_objects.append(LIBRARY)
            extension.libraries.append("z")  # of what a unit of it holds besides
        else:
            objects = os.path.join(self.build_temp, "core", "objects")
            os.makedirs(objects, exist_ok=True)  # the names begin with "..", so the folder must exist
            # An extension has one set of flags, but the kernels need their own; and nothing here needs torch's headers.
            for path, flags in core_sources():
                extension.extra_objects += self.compiler.compile(
                    [os.path.relpath(path, os.getcwd())], output_dir=objects,
                    include_dirs=INCLUDES, extra_postargs=CORE_FLAGS + flags)
        extension.sources = list(self.units())
        super().build_extensions()

    def units(self):
        """Files that include all sources of one line."""
        yield self.unit("module", sorted(glob.glob(os.path.join(HERE, "*.cpp"))))
        for i, names in enumerate([] if LIBRARY else TORCH):
            yield self.unit(f"torch{i}", [path for name in names for path in files_of(name)])

    def unit(self, name, parts):
        path = os.path.abspath(os.path.join(self.build_temp, name + ".cpp"))
        text = "".join(f'#include "{part}"\n' for part in parts)
        if not os.path.exists(path) or open(path).read() != text:
            os.makedirs(self.build_temp, exist_ok=True)
            with open(path, "w") as file:
                file.write(text)
        return path


setup(
    # What the library exports besides the module's entry would clash with another copy in the same process.
    ext_modules=[CppExtension("lockstep._C", ["module.cpp"], include_dirs=INCLUDES + [HERE],
                              extra_compile_args=["-std=c++20", "-O3", "-g0", "-DNDEBUG", "-DUSE_C10D_GLOO", "-fvisibility=hidden"],
                              extra_link_args=["-Wl,--exclude-libs,ALL"])],
    cmdclass={"build_ext": Build},
)
