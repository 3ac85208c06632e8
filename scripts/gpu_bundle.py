"""What a machine with a GPU but without Debian's packages needs to build Lockstep: headers, CMake files and shared libraries of
this machine's packages, in one archive of a few MiB."""

import glob
import os
import shutil
import subprocess
import tarfile
import tempfile

PACKAGES = ["nlohmann-json3-dev", "libcli11-dev", "libprotozero-dev", "libgtest-dev", "zlib1g-dev", "libarchive-dev",
            "libjpeg62-turbo-dev", "libpng-dev", "libssl-dev"]
LINKED = ["z", "archive", "jpeg", "png16", "ssl", "crypto"]
# Part of every system with a C++ compiler; an older one of another system must not be put before its own.
OF_THE_SYSTEM = ("ld-linux", "libc.so", "libm.so", "libdl.so", "librt.so", "libpthread.so", "libstdc++.so", "libgcc_s.so")
LIMIT_MIB = 60


def files_of(package):
    listed = subprocess.run(["dpkg-query", "-L", package], capture_output=True, text=True)
    if listed.returncode != 0:
        raise SystemExit(f"gpu_proof: the package {package} is not installed here; run scripts/setup --tests")
    return [line for line in listed.stdout.splitlines() if os.path.isfile(line)]


def is_wanted(path):
    return path.startswith("/usr/include/") or "/cmake/" in path or path.endswith(".a") and ("gtest" in path or "gmock" in path)


def shared_library(name):
    found = glob.glob(f"/usr/lib/*-linux-gnu/lib{name}.so")
    if not found:
        raise SystemExit(f"gpu_proof: lib{name}.so was not found; run scripts/setup --tests")
    return found[0]


def dependencies_of(library):
    """(name, path) of every shared library that it needs, the system's own left out."""
    lines = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout.splitlines()
    pairs = [(line.split()[0], line.split("=>")[1].split()[0]) for line in lines if "=>" in line and "not found" not in line]
    return [(name, path) for name, path in pairs if not name.startswith(OF_THE_SYSTEM)]


def put(path, folder, name=None):
    place = os.path.join(folder, path.lstrip("/") if name is None else name)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    shutil.copyfile(path, place)


def fill(folder):
    for package in PACKAGES:
        for path in filter(is_wanted, files_of(package)):
            put(path, folder)
            # Only a compiler of Debian's looks into the folder of the architecture by itself.
            for prefix in glob.glob("/usr/include/*-linux-gnu/"):
                if path.startswith(prefix):
                    put(path, folder, os.path.join("usr/include", path[len(prefix):]))
    for name in LINKED:
        library = shared_library(name)
        put(library, folder)
        for needed, path in dependencies_of(library):
            put(path, folder, os.path.join(os.path.dirname(library).lstrip("/"), needed))
        output = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        for line in output.splitlines():
            if "SONAME" in line:
                put(library, folder, os.path.join(os.path.dirname(library).lstrip("/"), line.split("[")[1].rstrip("]")))


def pack(archive):
    """Writes the archive, and returns its size in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        fill(folder)
        os.makedirs(os.path.dirname(os.path.abspath(archive)), exist_ok=True)
        with tarfile.open(archive, "w:xz", preset=3) as tar:
            tar.add(os.path.join(folder, "usr"), "usr")
    size = os.path.getsize(archive) / 2**20
    if size > LIMIT_MIB:
        raise SystemExit(f"gpu_proof: {archive} has {size:.0f} MiB, more than the {LIMIT_MIB} that it may have")
    return size


def unpack(archive, folder):
    """Returns the folder to give to CMake as a prefix."""
    prefix = os.path.join(folder, "usr")
    if not os.path.isdir(prefix):
        with tarfile.open(archive) as tar:
            tar.extractall(folder)
    return prefix


def library_folder(prefix):
    return glob.glob(os.path.join(prefix, "lib", "*-linux-gnu"))[0]
