"""One rank of PARAM's comms.py, which lies unchanged in the folder of the first argument; the others are its own.

PARAM lets a program name backends of its own (register_customized_backend): "lockstep" is its class for torch.distributed.
Ranks meet by a file, as there is no port to agree on; that holds for every backend.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist


def main():
    sources, meeting, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="lockstep_param_") as packages:
        os.symlink(os.path.abspath(sources), os.path.join(packages, "param_bench"))
        sys.path.insert(0, packages)
        from param_bench.train.comms.pt import comms, pytorch_backend_utils
        from param_bench.train.comms.pt.pytorch_dist_backend import PyTorchDistBackend

        def meet_by_file(self, _ip, _port):
            self.tcp_store = dist.FileStore(meeting, self.bootstrap_info.world_size)

        PyTorchDistBackend.initialize_tcpstore = meet_by_file
        if "lockstep" in arguments:
            import lockstep  # noqa: F401  the backend's name for torch.distributed
            pytorch_backend_utils.register_customized_backend("lockstep", PyTorchDistBackend)
        torch.set_num_threads(1)
        sys.argv = ["comms.py", *arguments]
        comms.main()


if __name__ == "__main__":
    main()
