"""A program catches what the library throws, prints it and returns 1: the launcher's exit code still tells its kind."""

import glob
import json
import os
import shutil
import tempfile
import unittest

import support


class ExitCodes(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def launched(self, code, what, *command, check_what=True):
        result = support.run(support.LOCKSTEP, "run", "-n", 2, "--run-dir", "launched", "--", *command, check=False, cwd=self.folder)
        self.assertEqual(result.returncode, code, result.stderr)
        with open(os.path.join(self.folder, "launched", "report.json"), encoding="utf-8") as file:
            report = json.load(file)
        self.assertEqual(report["exit_code"], code)
        if check_what:
            self.assertIn(what, report["culprit"]["what"])
        self.assertIn(what, result.stderr)
        return report

    def training(self, *arguments):
        return [os.path.join(support.BIN, "ema_checkpoint_resume"), "--folder", *arguments]

    def test_storage(self):
        with open(os.path.join(self.folder, "file"), "w", encoding="utf-8") as file:
            file.write("in the way")
        self.launched(48, "cannot make the folder file/below", *self.training("file/below"))

    def test_no_loadable_checkpoint(self):
        support.run(*self.training("run"), "--stop-after", 10, cwd=self.folder)
        files = glob.glob(os.path.join(self.folder, "run", "step-*.pt"))
        self.assertGreater(len(files), 0)
        for path in files:
            with open(path, "rb+") as file:
                file.seek(100)
                file.write(b"damaged")
        self.launched(49, "cannot resume: no checkpoint is intact", *self.training("run"))

    def test_data(self):
        self.launched(49, "nowhere", os.path.join(support.BIN, "cifar10_resnet18"), "--data", "nowhere", "--folder", "run")

    def test_shared_memory(self):
        hello = os.path.join(support.BIN, "hello_ranks")
        report = self.launched(50, "shared memory: wanted", "sh", "-c", f'[ $RANK = 0 ] || ulimit -f 8; exec {hello}')
        self.assertEqual(report["culprit"]["rank"], 1)  # the one with the limit, although both end because of it

    @support.thorough
    def test_few_descriptors(self):
        # Joining used to spin for ever, or to end with 40 and a message about something else.
        hello = os.path.join(support.BIN, "hello_ranks")
        for limited, limits in (("", range(4, 13)), ("[ $RANK = 0 ] || ", (5, 8, 12))):
            worked = []
            for limit in limits:
                with self.subTest(limit=limit, limited=limited):
                    result = support.run(support.LOCKSTEP, "run", "-n", 2, "--", "sh", "-c", f"{limited}ulimit -n {limit}; exec {hello}",
                                         check=False, cwd=self.folder, timeout=30)
                    if result.returncode == 0:
                        worked.append(limit)
                        continue
                    self.assertEqual(result.returncode, 50, result.stderr)
                    self.assertRegex(result.stderr, r"this process may have \d+ \(ulimit -n\) and has \d+ open. Allow at least \d+")
            self.assertIn(12, worked)


if __name__ == "__main__":
    support.main()
