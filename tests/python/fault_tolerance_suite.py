"""PyTorch's tests of process groups that form again, over the lockstep backend: its test_c10d_fault_tolerance.py.

    LOCKSTEP_PYTORCH_TESTS=<PyTorch's source>/test fault_tolerance_suite.py

No wheel of torch has the file; the source must be of the release that is installed, 2.14 or later. Skipped without.
"""

import importlib.util
import os
import sys
import unittest

import torch.distributed as dist

PATH = os.path.join(os.environ.get("LOCKSTEP_PYTORCH_TESTS", ""), "distributed/test_c10d_fault_tolerance.py")
LEAST = 12  # of 13, one of which is for NCCL alone

if os.path.exists(PATH) and hasattr(dist, "_reconfigure"):
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    specification = importlib.util.spec_from_file_location("test_c10d_fault_tolerance", PATH)
    suite = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(suite)

    class Lockstep(suite.AbstractFaultToleranceTest, MultiProcessTestCase):
        backend_name, device_type = "lockstep", "cpu"


def main():
    if "Lockstep" not in globals():
        print("SKIPPED BECAUSE this torch cannot form groups again" if not hasattr(dist, "_reconfigure") else
              "SKIPPED BECAUSE LOCKSTEP_PYTORCH_TESTS does not name the folder `test` of PyTorch's source")
        return 77
    result = unittest.TextTestRunner(verbosity=2).run(unittest.defaultTestLoader.loadTestsFromTestCase(Lockstep))
    passed = result.testsRun - len(result.failures) - len(result.errors) - len(result.skipped)
    print(f"{passed} passed, {len(result.failures) + len(result.errors)} failed, {len(result.skipped)} skipped")
    return 0 if result.wasSuccessful() and passed >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
