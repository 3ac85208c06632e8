"""Files of data sets written by Python's tarfile, numpy and PIL are read by C++ with the same pixels and labels."""

import os
import subprocess
import unittest

from support import BIN, SOURCE, main, python_with_torch, run


class DataFiles(unittest.TestCase):
    def test_what_python_writes(self):
        python = python_with_torch()
        if not python or subprocess.run([python, "-c", "import numpy, PIL"], capture_output=True).returncode != 0:
            print("SKIPPED BECAUSE no Python with numpy and PIL was found: scripts/setup --tests")
            self.skipTest("no Python with numpy and PIL: scripts/setup --tests")
        result = run(python, os.path.join(SOURCE, "tests/data/compare_data.py"), os.path.join(BIN, "read_data"), timeout=300)
        print(result.stderr)
        self.assertRegex(result.stderr, r"(?m)^Ran [89] tests")
        self.assertNotIn("skipped", result.stderr)


if __name__ == "__main__":
    main()
