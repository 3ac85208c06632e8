"""scripts/gpu_proof, as far as a machine without a GPU shows it: what it packs, and what it says of a torch for CPUs."""

import os
import subprocess
import sys
import tempfile
import unittest

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(SOURCE, "scripts"))
import gpu_bundle  # noqa: E402
from python_with_torch import python_with_torch  # noqa: E402

PROOF = os.path.join(SOURCE, "scripts", "gpu_proof")


class GpuProof(unittest.TestCase):
    def test_it_packs_what_another_machine_lacks(self):
        with tempfile.TemporaryDirectory() as folder:
            gpu_bundle.fill(folder)  # pack() compresses it, a minute on a slow machine
            names = {name for _, _, files in os.walk(folder) for name in files}
            size = sum(os.path.getsize(os.path.join(path, name)) for path, _, files in os.walk(folder) for name in files)
        self.assertLess(size, 120 * 2**20)
        for needed in ("json.hpp", "CLI11Config.cmake", "gtest.h", "libgtest.a", "zlib.h", "archive.h", "jpeglib.h", "png.h", "ssl.h", "libarchive.so", "libz.so.1"):
            self.assertIn(needed, names)
        of_the_system = [name for name in names if name.startswith(("libc.so", "libm.so", "libstdc++", "libgcc_s", "ld-linux"))]
        self.assertEqual(of_the_system, [])

    def test_a_torch_for_cpus_is_refused(self):
        python = python_with_torch()
        if python is None:
            self.skipTest("SKIPPED BECAUSE no Python imports torch")
        version = subprocess.run([python, "-c", "import torch; print(torch.version.cuda)"], capture_output=True, text=True).stdout.strip()
        if version != "None":
            self.skipTest("SKIPPED BECAUSE this torch is for CUDA")
        done = subprocess.run([PROOF, "--python", python], capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 1)
        self.assertIn("is not for CUDA; name another with --python", done.stderr)


if __name__ == "__main__":
    unittest.main()
