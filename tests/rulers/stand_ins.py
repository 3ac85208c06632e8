"""Folders that look like the OSU micro-benchmarks and like PARAM from outside, for tests of the drivers where the real ones are not there."""

import os

CONFIGURE = """#!/bin/sh
here=$(dirname "$0")
compiler=${1#CC=}
for part in c/mpi/collective/blocking c/mpi/pt2pt/standard; do
  mkdir -p $part
  printf 'osu_%%:\\n\\t%s -O1 -o $@ %s/program.c -DNAME=\\\\"$@\\\\"\\n' "$compiler" "$here" >$part/Makefile
done
touch Makefile
"""

# Prints 7 us. "bcast" and "reduce_scatter" find a wrong result, "gather" reduces a type that Lockstep does not know.
PROGRAM = """#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int argc, char** argv) {
  int rank, size, validates = 0;
  float one = 1, sum = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int i = 1; i < argc; ++i) validates |= strcmp(argv[i], "-c") == 0;
  if (!strstr(NAME, "bcast")) MPI_Allreduce(&one, &sum, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  long double large = 1, largest = 0;
  if (strstr(NAME, "gather")) MPI_Allreduce(&large, &largest, 1, MPI_LONG_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  const int is_right = sum == (float)size && !strstr(NAME, "reduce_scatter");
  if (rank == 0) {
    printf("\\n# OSU MPI Latency Test v7.4\\n# Size  Avg Latency(us)\\n");
    printf("4   7.00 %s\\n1024  14.50 %s\\n", validates ? is_right ? "Pass" : "Fail" : "", validates ? "Pass" : "");
  }
  MPI_Finalize();
  return 0;
}
"""

PARAM = {"comms.py": """
import sys
import torch, torch.distributed as dist
from param_bench.train.comms.pt import pytorch_backend_utils
from param_bench.train.comms.pt.pytorch_dist_backend import PyTorchDistBackend

def main():
    options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    backend = pytorch_backend_utils.customized_backend.get(options["--backend"], PyTorchDistBackend)()
    backend.initialize_tcpstore("127.0.0.1", "29500")
    dist.init_process_group(options["--backend"], store=backend.tcp_store, rank=backend.bootstrap_info.rank, world_size=backend.bootstrap_info.world_size)
    ones = torch.ones(4)
    dist.all_reduce(ones)
    assert ones.tolist() == [2.0] * 4
    if dist.get_rank() == 0:
        for name in options["--collective"].split(","):
            if name != "reduce_scatter":
                for size in (int(options["--b"]), int(options["--e"])):
                    taken = 10.0 if options["--backend"] == "lockstep" else 25.0
                    print(f"\\tCOMMS-RES-{name}-float32{size:>18}{2:>18}{taken:>18}{26.0:>12}")
    dist.barrier()
    dist.destroy_process_group()
""", "pytorch_backend_utils.py": """
customized_backend = {}
def register_customized_backend(name, made):
    customized_backend[name] = made
""", "pytorch_dist_backend.py": """
import os
class Info:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
class PyTorchDistBackend:
    bootstrap_info = Info
    def initialize_tcpstore(self, ip, port):
        raise AssertionError("no port is agreed on")
"""}


def write_osu(folder):
    for part in ("c/mpi/collective/blocking", "c/mpi/pt2pt/standard"):
        os.makedirs(os.path.join(folder, part))
    for name, content in (("configure", CONFIGURE), ("program.c", PROGRAM)):
        with open(os.path.join(folder, name), "w") as file:
            file.write(content)
    os.chmod(os.path.join(folder, "configure"), 0o755)


def write_param(folder):
    packages = os.path.join(folder, "train/comms/pt")
    os.makedirs(packages)
    for name, content in PARAM.items():
        with open(os.path.join(packages, name), "w") as file:
            file.write(content)
