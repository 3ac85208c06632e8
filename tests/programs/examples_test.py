"""Example programs print what their first comment says they print."""

import os
import tempfile
import unittest

import support


def promised(example):
    """The lines below "prints" in the example's first comment."""
    with open(os.path.join(support.SOURCE, "examples", example + ".cpp"), encoding="utf-8") as file:
        comment = file.read().split("\n\n")[0]
    lines = [line.removeprefix("//").strip() for line in comment.split("\n// prints\n")[1].splitlines()]
    return [line for line in lines if line]


class Examples(unittest.TestCase):
    def test_edit_live_model(self):
        lines = promised("edit_live_model")
        self.assertGreater(len(lines), 5)
        with tempfile.TemporaryDirectory() as folder:
            result = support.run(support.LOCKSTEP, "run", "-n", 2, "--run-dir", folder, "--",
                                 os.path.join(support.BIN, "edit_live_model"), cwd=folder)
        self.assertEqual(result.stdout.splitlines(), lines)

    def test_edit_live_model_wants_two_ranks(self):
        result = support.run(os.path.join(support.BIN, "edit_live_model"), check=False)
        self.assertEqual(result.returncode, 1)
        self.assertIn("lockstep run -n 2", result.stderr)


if __name__ == "__main__":
    support.main()
