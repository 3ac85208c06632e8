"""What tests of fuzzers share."""

import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BIN, run  # noqa: E402

SECONDS = 600 if os.environ.get("LOCKSTEP_NIGHTLY") else 10


class FuzzTest(unittest.TestCase):
    """A test with an empty folder, skipped where no fuzzer was built."""

    words = []  # of the format, which chance would not find

    def setUp(self):
        if not os.path.exists(os.path.join(BIN, "fuzz_pt")):
            print("SKIPPED BECAUSE no clang with libFuzzer was found: apt-get install clang-14 libclang-rt-14-dev")
            self.skipTest("no clang with libFuzzer: apt-get install clang-14 libclang-rt-14-dev")
        folder = tempfile.TemporaryDirectory(prefix="lockstep_fuzz_")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def fuzz(self, reader, seeds, seconds=SECONDS, runs=None, max_len=65536, least=100):
        """Runs a fuzzer for `seconds`, or for `runs` executions where that is sooner."""
        corpus = self.path("corpus_" + reader)
        os.mkdir(corpus)
        for name, content in seeds.items():
            with open(os.path.join(corpus, name), "wb") as file:
                file.write(content)
        with open(self.path("words"), "w") as file:  # libFuzzer refuses an empty one
            file.write("".join(f'"{word}"\n' for word in self.words or ["0"]))
        limits = [f"-max_total_time={seconds}"] + ([f"-runs={runs}"] if runs else [])
        result = run(os.path.join(BIN, reader), corpus, *limits, f"-max_len={max_len}", "-rss_limit_mb=3000", "-timeout=20",
                     f"-dict={self.path('words')}", f"-artifact_prefix={self.folder}/", timeout=seconds + 300, check=False)
        kept = sorted(name for name in os.listdir(self.folder) if name.startswith(("crash-", "oom-", "timeout-", "leak-")))
        for name in kept:
            with open(self.path(name), "rb") as file:
                print(name, file.read(4096).hex())
        self.assertEqual((result.returncode, kept), (0, []), result.stderr[-4000:])
        done = next(line for line in reversed(result.stderr.splitlines()) if line.startswith("Done"))
        print(f"{reader}: {done}")
        self.assertGreaterEqual(int(done.split()[1]), least)
