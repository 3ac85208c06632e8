"""The package built with other releases of torch than this tree's, the oldest and the newest above all.

    LOCKSTEP_OTHER_TORCHES=FOLDER[:FOLDER]... releases_test.py

Each folder is what `pip install --target FOLDER torch==2.11.0 numpy setuptools` makes. Skipped where none is named.
"""

import os
import subprocess
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(os.path.dirname(HERE))
BUILD = os.path.abspath(os.environ.get("LOCKSTEP_BUILD_DIR", os.path.join(SOURCE, "build")))
FOLDERS = [folder for folder in os.environ.get("LOCKSTEP_OTHER_TORCHES", "").split(os.pathsep) if folder]
SKIPPED = 77
TESTS = (("backend_test.py", "Collectives.test_every_collective", "Collectives.test_messages", "Collectives.test_split_and_merge",
          "SeveralMachines.test_every_collective"), ("attach_test.py", "InShort", "SeveralMachines.test_in_short"),
         ("reconfigure_test.py", "Reconfigure"))


def run(folder, script, *arguments, also=(), limit=1500):
    """With the torch in `folder`. Its package is built apart from this tree's, and every source of it compiled."""
    paths = os.pathsep.join([*also, folder])
    environment = {**os.environ, "PYTHONPATH": paths, "LOCKSTEP_BUILD_DIR": os.path.join(BUILD, "releases", folder.strip("/").replace("/", "_"))}
    return subprocess.run([sys.executable, os.path.join(HERE, script), *arguments], env=environment, capture_output=True, text=True, timeout=limit)


class Releases(unittest.TestCase):
    def test_each_compiles_and_works(self):
        for folder in FOLDERS:
            with self.subTest(folder=folder):
                built = run(folder, "package.py")
                self.assertEqual(built.returncode, 0, built.stdout + built.stderr)
                site = built.stdout.splitlines()[-1]
                for test in TESTS:
                    done = run(folder, *test, also=[site])
                    self.assertIn(done.returncode, (0, SKIPPED), done.stdout + done.stderr)


if __name__ == "__main__":
    if not FOLDERS:
        print("SKIPPED BECAUSE LOCKSTEP_OTHER_TORCHES names no folder with another torch")
        sys.exit(SKIPPED)
    unittest.main(verbosity=2)
