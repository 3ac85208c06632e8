"""Which Python the tests and benches use as that of the build's torch."""

import os
import sys
import tempfile
import unittest
from unittest import mock

from support import SOURCE, main, run

sys.path.insert(0, os.path.join(SOURCE, "scripts"))
import python_with_torch as finder  # noqa: E402


class PythonWithTorch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.source = folder.name
        self.torch_dir = os.path.join(self.source, "prefix/lib/python3/site-packages/torch/share/cmake/Torch")

    def write(self, path, content, mode=0o644):
        path = os.path.join(self.source, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)
        os.chmod(path, mode)
        return path

    def python(self, path, imports):
        """A program that passes for a Python with torch, or for one without."""
        return self.write(path, f"#!/bin/sh\n[ \"$*\" = '-c import torch' ] && exit {0 if imports else 1}\nexit 2\n", 0o755)

    def found(self):
        finder.python_with_torch.cache_clear()
        with mock.patch.dict(os.environ, PATH=os.path.join(self.source, "path")):
            return finder.python_with_torch(self.source)

    def test_the_first_that_imports_torch_is_taken(self):
        self.assertIsNone(self.found())
        on_path = self.python("path/python3", imports=True)
        self.assertEqual(self.found(), on_path)
        own = self.python(".venv/bin/python", imports=True)
        self.assertEqual(self.found(), own)
        self.write(".setup/torch_dir", self.torch_dir + "\n")
        self.assertEqual(self.found(), own)  # LibTorch lies in no Python
        of_build = self.python("prefix/bin/python", imports=True)
        self.assertEqual(self.found(), of_build)

    def test_one_without_torch_is_passed_over(self):
        self.write(".setup/torch_dir", self.torch_dir)
        self.python("prefix/bin/python", imports=False)
        self.python(".venv/bin/python", imports=False)
        on_path = self.python("path/python3", imports=True)
        self.assertEqual(self.found(), on_path)
        self.python("path/python3", imports=False)
        self.assertIsNone(self.found())

    def test_the_script_prints_what_the_function_finds(self):
        finder.python_with_torch.cache_clear()
        printed = run(os.path.join(SOURCE, "scripts/python_with_torch.py")).stdout.strip()
        self.assertEqual(printed, finder.python_with_torch() or "")


if __name__ == "__main__":
    main()
