"""The programs of the guides compile: every block of C++ in them, in one file."""

import os
import re
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BUILD, SOURCE, main, run  # noqa: E402

GUIDES = ("from_pytorch_ddp", "from_horovod", "from_mpi", "choosing_ranks_and_threads", "common_mistakes")
# What the blocks take for granted.
BEFORE = """#include <cstdio>
#include <string>
#include <vector>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor images) { return out(images.flatten(1)); }
  torch::nn::Linear out{register_module("out", torch::nn::Linear(28 * 28, 10))};
};
TORCH_MODULE(Net);
"""


class Guides(unittest.TestCase):
    def test_every_block_compiles(self):
        program, blocks = BEFORE, 0
        for guide in GUIDES:
            with open(os.path.join(SOURCE, "docs", guide + ".md"), encoding="utf-8") as file:
                text = file.read()
            for block in re.finditer(r"^```cpp\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
                blocks += 1
                line = text.count("\n", 0, block.start()) + 2
                program += f'namespace block_{blocks} {{\n#line {line} "docs/{guide}.md"\n{block.group(1)}}}\n'
        self.assertGreaterEqual(blocks, 7)
        with tempfile.TemporaryDirectory(prefix="lockstep_test_") as folder:
            with open(os.path.join(folder, "CMakeLists.txt"), "w") as file:
                file.write("cmake_minimum_required(VERSION 3.25)\nproject(guides LANGUAGES CXX)\nfind_package(Torch REQUIRED)\n"
                           "add_library(guides OBJECT guides.cpp)\ntarget_compile_features(guides PRIVATE cxx_std_20)\n"
                           f"target_include_directories(guides PRIVATE {SOURCE}/include)\ntarget_link_libraries(guides PRIVATE ${{TORCH_LIBRARIES}})\n"
                           "target_compile_options(guides PRIVATE -fsyntax-only -Wall)\n")
            with open(os.path.join(folder, "guides.cpp"), "w") as file:
                file.write(program)
            with open(os.path.join(BUILD, "CMakeCache.txt")) as file:
                torch, = re.findall(r"(?m)^Torch_DIR:\w+=(.*)$", file.read())
            run("cmake", "-G", "Ninja", "-B", "build", f"-DTorch_DIR={torch}", cwd=folder)
            run("cmake", "--build", "build", cwd=folder, timeout=400)


if __name__ == "__main__":
    main()
