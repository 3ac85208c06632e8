"""Builds lockstep._C from the sources of the C++ library, against the torch that is installed."""

import glob
import os
import platform
import re
import site
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

from setuptools import setup

try:
    import torch
except ImportError:
    # pip builds in an environment of its own; the torch to build against is in the one that it installs into.
    sys.path += [sysconfig.get_path("platlib"), site.getusersitepackages()]
    try:
        import torch
    except ImportError:
        sys.exit('lockstep is built against the torch that is installed, and this Python has none: pip install "torch==2.13.*", then try again')
RELEASE = re.match(r"(\d+)\.(\d+)", torch.__version__)
if not (2, 11) <= (int(RELEASE[1]), int(RELEASE[2])) < (2, 16):
    sys.exit(f'lockstep is built against torch 2.11 to 2.15, but torch {torch.__version__} is installed: pip install "torch==2.13.*", then try again')
from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: E402

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
         ["reducer", "reducer/hooks/all_reduce_hook"], ["data_parallel", "nn"], ["optim", "checkpoint/group_options", "checkpoint/optimizer_kind", "checkpoint/sliced_memory",
          "diloco", "checkpoint/optimizer_state", "checkpoint/scalar_type", "checkpoint/format/dtype", "checkpoint/state_dict", "checkpoint/state_fit"]]
CORE_FLAGS = ["-std=c++20", "-O3", "-g0", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
AVX2 = ["-mavx2", "-mf16c"]
AVX512 = AVX2 + ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
X86 = platform.machine() in ("x86_64", "AMD64")
KERNELS = {"avx2.cpp": AVX2, "avx512.cpp": AVX512} if X86 else {"neon.cpp": []} if platform.machine() in ("aarch64", "arm64") else {}
DEFINED = ["-DLOCKSTEP_X86_KERNELS"] if X86 else ["-DLOCKSTEP_NEON_KERNELS"] if KERNELS else []
DEFINED = [*DEFINED, f'-DLOCKSTEP_VERSION="{VERSION}"']


def say(text):
    """On the terminal, where there is one: pip keeps what is printed to itself, unless it is called with -v."""
    try:
        with open("/dev/tty", "w") as terminal:
            terminal.write(f"\n{text}\n")
    except OSError:
        print(text, flush=True)


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
            sources = list(core_sources())
            say(f"lockstep: compiling for torch {torch.__version__}, about 3 minutes on 2 cores. Part 1 of 2: {len(sources)} files without torch")
            # An extension has one set of flags, but the kernels need their own; and nothing here needs torch's headers.
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                for built in pool.map(lambda source: self.compiler.compile([os.path.relpath(source[0], os.getcwd())], output_dir=objects,
                                                                           include_dirs=INCLUDES, extra_postargs=CORE_FLAGS + source[1]), sources):
                    extension.extra_objects += built
            say(f"lockstep: part 2 of 2: {len(TORCH) + 1} files that include torch")
        extension.sources = list(self.units())
        super().build_extensions()
        self.write_built(os.path.join(self.build_lib, "lockstep", "_built.py"))

    def write_built(self, path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(f'"""What the package was built with; setup.py writes it."""\n\nTORCH = "{RELEASE[0]}"\n')

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
    # An extension works with the release of torch that it was compiled against, so each has a package of its own.
    install_requires=[f"torch=={RELEASE[0]}.*"],
    options={"egg_info": {"tag_build": f"+torch{RELEASE[0]}"}},
    # What the library exports besides the module's entry would clash with another copy in the same process.
    ext_modules=[CppExtension("lockstep._C", ["module.cpp"], include_dirs=INCLUDES + [HERE],
                              extra_compile_args=["-std=c++20", "-O3", "-g0", "-DNDEBUG", "-DUSE_C10D_GLOO", "-fvisibility=hidden"],
                              extra_link_args=["-Wl,--exclude-libs,ALL"])],
    cmdclass={"build_ext": Build},
)
