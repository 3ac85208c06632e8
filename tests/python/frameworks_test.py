"""accelerate, Lightning and transformers: over the backend, in programs that import nothing from lockstep, with results
equal to Gloo's; and by lockstep.attach(), in the programs of python/examples."""

import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
DEADLINE_S = 200


class Frameworks(unittest.TestCase):
    def train(self, framework, backend):
        """What each of two ranks under torchrun wrote."""
        program = os.path.join(HERE, f"train_with_{framework}.py")
        with open(program) as file:
            self.assertNotIn("import lockstep", file.read())
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "result")
            done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                                   program, backend, path], capture_output=True, text=True, timeout=DEADLINE_S)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            return [torch.load(f"{path}.{rank}") for rank in range(2)]

    def compare(self, framework):
        if importlib.util.find_spec(framework) is None:
            print(f"SKIPPED BECAUSE {framework} is not installed; scripts/setup --tests does it", flush=True)
            self.skipTest(f"no {framework}")
        ours, gloo = self.train(framework, "lockstep"), self.train(framework, "gloo")
        for rank in range(2):
            self.assertEqual((ours[rank]["backend"], gloo[rank]["backend"]), ("lockstep", "gloo"))
            self.assertEqual((ours[rank]["imported"], gloo[rank]["imported"]), (True, False))
            self.assertEqual(ours[rank]["wrapper"], "DistributedDataParallel")
            self.assertEqual(ours[rank]["losses"].shape, (6, 2))
            # There is one order of two summands.
            self.assertTrue(torch.equal(ours[rank]["losses"], gloo[rank]["losses"]))
            self.assertGreater(len(gloo[rank]["weights"]), 3)
            for name, weight in gloo[rank]["weights"].items():
                self.assertTrue(torch.equal(ours[rank]["weights"][name], weight), name)

    def test_accelerate(self):
        self.compare("accelerate")

    def test_accelerate_takes_no_backend_by_name_on_cpus(self):
        # If this fails, accelerate accepts it now, and the READMEs need no longer ask for init_process_group.
        if importlib.util.find_spec("accelerate") is None:
            self.skipTest("no accelerate")
        program = ("from accelerate import Accelerator; from accelerate.utils import InitProcessGroupKwargs; "
                   "Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend='lockstep')])")
        variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True,
                              text=True, timeout=DEADLINE_S)
        self.assertIn("backend lockstep is not available, please use gloo", done.stderr)

    def test_lightning(self):
        self.compare("lightning")

    def attach(self, framework):
        if importlib.util.find_spec(framework) is None:
            print(f"SKIPPED BECAUSE {framework} is not installed; scripts/setup --tests does it", flush=True)
            self.skipTest(f"no {framework}")
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                               os.path.join(HERE, "both_ways.py"), f"with_{framework}"],
                              capture_output=True, text=True, timeout=DEADLINE_S)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        for rank in range(2):
            self.assertRegex(done.stdout, rf"(?<!\d){rank}:\d+ equal\n")  # a rank may print between a line and its end

    def test_attach_in_accelerate(self):
        self.attach("accelerate")

    def test_attach_in_lightning(self):
        self.attach("lightning")

    def test_attach_in_transformers(self):
        self.attach("transformers")


if __name__ == "__main__":
    unittest.main(argv=["frameworks_test", "-v", *sys.argv[1:]])
