"""What scripts/setup says where nothing can be downloaded: at once, what is missing, and how to go on."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import SOURCE, environment, main, run  # noqa: E402

# What dpkg-query and apt-get are here: all packages are there, or none is and no mirror answers.
ALL_INSTALLED = "#!/bin/sh\necho installed\n"
NONE_INSTALLED = "#!/bin/sh\nexit 1\n"
NO_MIRROR = """#!/bin/sh
echo "$*" >> apt-get.calls
[ "$1" = update ] || exit 100
echo "Err:1 http://mirror.invalid/debian bookworm InRelease"
echo "  Temporary failure resolving 'mirror.invalid'"
echo "W: Some index files failed to download. They have been ignored, or old ones used instead."
"""
MARK = "#!/bin/sh\ntouch compiled\n"


class Setup(unittest.TestCase):
    def setUp(self):
        if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode != 0:
            self.skipTest("this process may not make a network namespace")
        if subprocess.run(["python3", "-c", "import torch"], capture_output=True).returncode == 0:
            self.skipTest("python3 imports torch here, so nothing would be downloaded")
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        os.makedirs(os.path.join(self.folder, "scripts"))
        shutil.copy(os.path.join(SOURCE, "scripts/setup"), os.path.join(self.folder, "scripts/setup"))

    def setup_here(self, programs, **variables):
        """Runs scripts/setup without a network, with these programs before the system's; returns the finished process and its seconds."""
        shims = os.path.join(self.folder, "shims")
        os.makedirs(shims, exist_ok=True)
        for name, text in programs.items():
            path = os.path.join(shims, name)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(path, 0o755)
        env = {name: value for name, value in environment().items() if not name.upper().startswith(("PIP_", "TORCH_DIR")) and not name.lower().endswith("_proxy")}
        env.update(PATH=shims + ":" + env["PATH"], HOME=self.folder, PIP_CONFIG_FILE="/dev/null", **variables)
        start = time.monotonic()
        done = run("unshare", "-rn", os.path.join(self.folder, "scripts/setup"), env=env, cwd=self.folder, check=False)
        return done, time.monotonic() - start

    def is_there(self, name):
        return os.path.exists(os.path.join(self.folder, name))

    def test_without_a_network_it_names_torch_dir_at_once(self):
        done, seconds = self.setup_here({"dpkg-query": ALL_INSTALLED, "cmake": MARK})
        self.assertEqual(done.returncode, 1, done.stderr)
        for part in ("cannot download LibTorch: pip reaches no package index", "TORCH_DIR=/path/to/libtorch"):
            self.assertIn(part, done.stderr)
        for part in ("No matching distribution", "Traceback", "retry"):
            self.assertNotIn(part, done.stderr)
        self.assertFalse(self.is_there("compiled"), "it compiled the launcher first")
        self.assertLess(seconds, 60, "137 s before; the larger part of these is the making of .venv")

    def test_a_download_is_said_to_take_minutes(self):
        python = os.path.join(self.folder, ".venv/bin/python")
        os.makedirs(os.path.dirname(python))
        with open(python, "w", encoding="utf-8") as file:
            file.write('#!/bin/sh\n[ "$1" = -m ]\n')  # pip finds and installs what it is asked for; nothing imports torch
        os.chmod(python, 0o755)
        done, _ = self.setup_here({"dpkg-query": ALL_INSTALLED, "cmake": MARK})
        self.assertRegex(done.stderr, r"(?m)^setup: installing torch 2\S+ into \.venv \(hundreds of megabytes, so this takes minutes")

    def test_what_torch_dir_says_is_done(self):
        torch = os.path.join(self.folder, "libtorch")
        os.makedirs(os.path.join(torch, "share/cmake/Torch"))
        with open(os.path.join(torch, "share/cmake/Torch/TorchConfigVersion.cmake"), "w", encoding="utf-8") as file:
            file.write('set(PACKAGE_VERSION "2.13.0")\n')
        done, _ = self.setup_here({"dpkg-query": ALL_INSTALLED, "cmake": MARK}, TORCH_DIR=torch)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        with open(os.path.join(self.folder, ".setup/torch_dir"), encoding="utf-8") as file:
            self.assertEqual(file.read().strip(), os.path.join(torch, "share/cmake/Torch"))

    def test_packages_that_cannot_be_downloaded_are_named_once(self):
        done, seconds = self.setup_here({"dpkg-query": NONE_INSTALLED, "apt-get": NO_MIRROR, "cmake": MARK})
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(done.stderr.count("cannot download packages: apt-get reaches no mirror"), 1, done.stderr)
        self.assertIn("these Debian packages are needed: ", done.stderr)
        self.assertIn("libcli11-dev", done.stderr)
        self.assertIn("TORCH_DIR=/path/to/libtorch", done.stderr, "whoever finds the packages elsewhere meets no second refusal")
        with open(os.path.join(self.folder, "apt-get.calls"), encoding="utf-8") as file:
            self.assertEqual(len(file.readlines()), 1)
        self.assertLess(seconds, 30)


if __name__ == "__main__":
    main()
