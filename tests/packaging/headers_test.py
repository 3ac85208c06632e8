"""The public headers in a program that is compiled with warnings as errors, in any order, alone, and by an older standard."""

import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BUILD, SOURCE, main, run, thorough  # noqa: E402

INCLUDE = os.path.join(SOURCE, "include")
# mpi.h needs an MPI's own header, which not every machine has.
HEADERS = sorted(name for name in os.listdir(os.path.join(INCLUDE, "lockstep")) if name.endswith(".h") and name != "mpi.h")
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Werror")
# With it g++ does not use a precompiled header, and each file takes twenty times as long.
PEDANTIC = "-Wpedantic"
# Members that a program must give, so that -Wextra is right to miss them.
WANTED = {"OneCycleOptions": "total_steps"}


def read(*path):
    with open(os.path.join(SOURCE, *path), encoding="utf-8") as file:
        return file.read()


def compile_command():
    """What compiles a file of the examples, without its files and warnings: with the precompiled <torch/torch.h>."""
    with open(os.path.join(BUILD, "compile_commands.json"), encoding="utf-8") as file:
        entry = next(entry for entry in json.load(file) if "/hello_ranks" in entry["file"])
    command = re.sub(r"^.*?(\S*[cg]\+\+\S*) ", r"\1 ", entry["command"])  # without ccache
    command = re.sub(r" -o \S+| -c \S+| -W\S+| -fpch-preprocess", "", command)
    return command.split()


def mpis():
    """MPI -> the options that its compiler adds; of those that the build has found."""
    with open(os.path.join(BUILD, "CMakeCache.txt"), encoding="utf-8") as file:
        compilers = re.findall(r"(?m)^LOCKSTEP_MPICXX_(\w+):\w+=(/.*)$", file.read())
    found = {}
    for name, compiler in compilers:
        said = run(compiler, "-show").stdout.split()
        folders = [word.removeprefix("-I") for word in said if word.startswith("-I")]
        found[name] = [part for folder in folders for part in ("-isystem", folder)] + ["-DOMPI_SKIP_MPICXX", "-DMPICH_SKIP_MPICXX"]
    return found


def options():
    """(header, struct, members) of the public structs of options."""
    for header in HEADERS:
        for struct in re.finditer(r"^struct (\w+Options) \{\n(.*?)^\};", read("include/lockstep", header), re.MULTILINE | re.DOTALL):
            code = re.sub(r"//[^\n]*", "", struct[2])
            members = re.findall(r"(\w+)(?: = [^;]*|\{[^;]*\})?;", code)
            yield header, struct[1], members


def space_of(struct, code):
    """The namespace in which a header defines it."""
    open_ones = []
    for opened, closed, found in re.findall(r"^namespace ([\w:]+) \{|^(\}  // namespace)|^struct (" + struct + r") \{", code, re.MULTILINE):
        if found:
            break
        open_ones = open_ones[:-1] if closed else [*open_ones, opened]
    return "::".join(open_ones)


class Headers(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.command = compile_command()

    def compiled(self, name, program, *flags, command=None):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(program)
        return run(*(command or self.command), *WARNINGS, "-fsyntax-only", *flags, path, check=False, timeout=300)

    def test_together_in_both_orders_with_options_by_name(self):
        """A program may name any one option, {.seed = 42}, without a warning about the others."""
        lines, seen = [], 0
        for header, struct, members in options():
            space = space_of(struct, read("include/lockstep", header))
            for member in (members[0], members[-1]):
                seen += 1
                given = f".{WANTED[struct]} = 1, " if WANTED.get(struct, member) != member else ""
                lines.append(f"[[maybe_unused]] const {space}::{struct} options_{seen}{{{given}.{member} = {{}}}};")
        self.assertGreater(seen, 40)
        includes = [f"#include <lockstep/{name}>" for name in HEADERS]
        for name, order, flags in (("forwards.cpp", includes, [PEDANTIC]), ("backwards.cpp", includes[::-1], [])):
            done = self.compiled(name, "\n".join([*order, *lines]) + "\n", *flags)
            self.assertEqual(done.returncode, 0, done.stderr[:4000])

    def test_readme_s_program(self):
        program, = re.findall(r"^```cpp\n(.*?)^```", read("README.md"), re.MULTILINE | re.DOTALL)
        done = self.compiled("train.cpp", program, PEDANTIC)
        self.assertEqual(done.returncode, 0, done.stderr[:4000])

    def test_mpi_h_alone(self):
        found = mpis()
        if not found:
            print("SKIPPED BECAUSE no MPI was found when the build was configured: scripts/setup --tests")
            self.skipTest("no MPI")
        for name, flags in found.items():
            done = self.compiled(f"{name}.cpp", "#include <lockstep/mpi.h>\n[[maybe_unused]] lockstep::Context (*join)(MPI_Comm, lockstep::ContextOptions) = lockstep::mpi_context;\n", *flags)
            self.assertEqual(done.returncode, 0, f"{name}\n{done.stderr[:4000]}")

    def test_an_older_standard_is_told_in_one_sentence(self):
        without = [word for word in self.command if not word.startswith("-std=") and word != "-include" and not word.endswith("cmake_pch.hxx")]
        done = self.compiled("old.cpp", "#include <lockstep/context.h>\n", "-std=c++17", command=without)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn('#error "Lockstep needs C++20: compile with -std=c++20', done.stderr)
        self.assertEqual(len(re.findall(r"error:", done.stderr)), 2, done.stderr)  # the sentence, and the end of the compilation
        # Every other header comes to the same sentence, before any code of its own.
        for name in HEADERS:
            if name not in ("c.h", "train_c.h", "cxx20.h", "lockstep.h"):
                first = re.search(r"#include <lockstep/(\w+)\.h>|^namespace lockstep", read("include/lockstep", name), re.MULTILINE)
                self.assertTrue(first and first[1], f"{name} includes neither cxx20.h nor a header that does")

    def test_a_function_of_the_wrong_type_is_told_in_one_sentence(self):
        program = """
            #include <lockstep/from_function.h>
            #include <torch/torch.h>
            using Indices = at::ArrayRef<int64_t>;
            int main() { return static_cast<int>(lockstep::datasets::FromFunction(4, %s).size()); }
            """
        for name, function in {"result": "[](Indices) { return torch::ones({2}); }", "indices": "[](const std::vector<int>&) { return lockstep::Batch(); }"}.items():
            with self.subTest(name):
                done = self.compiled("function.cpp", program % function)
                self.assertNotEqual(done.returncode, 0)
                self.assertEqual(len(re.findall(r"error:", done.stderr)), 1, done.stderr[:4000])
                self.assertIn("FromFunction needs a function that takes at::ArrayRef<int64_t> indices, or these and", done.stderr)
        for function in ("[](Indices) { return lockstep::Batch(); }", "[](Indices, at::ArrayRef<uint64_t>) { return lockstep::Batch(); }"):
            done = self.compiled("right.cpp", program % function)
            self.assertEqual(done.returncode, 0, done.stderr[:4000])

    def test_a_bare_pointer_is_told_in_one_sentence(self):
        """Without pages about templates. An object on the stack, as in PyTorch's own C++ MNIST, is taken."""
        program = """
            #include <lockstep/lockstep.h>
            #include <torch/torch.h>
            struct Net : torch::nn::Module {
              torch::Tensor forward(torch::Tensor x) { return layer->forward(x); }
              torch::nn::Linear layer{register_module("layer", torch::nn::Linear(2, 2))};
            };
            int main(int argc, const char* argv[]) {
              lockstep::Context context(argc, argv);
              Net net;
              torch::optim::SGD optimizer(net.parameters(), 0.1);
              %s
            }
            """
        model = """
              lockstep::DistributedDataParallel model(%s, context%s);
              for (int step = 0; step < 3; ++step) model(torch::ones({2, 2})).sum().backward();
              model->parameters();
              if (model.step_complete()) model.module();"""
        wrong = {"pointer": model % ("&net", ""), "options": model % ("&net", ", {.bucket_cap_mb = 1}"),
                 "trainer": "lockstep::Trainer trainer(&net, optimizer, context, {.epochs = 2}); trainer.model();",
                 "named": "Net* const pointer = &net; lockstep::Trainer trainer(pointer, optimizer, context); trainer.model();",
                 "attached": "lockstep::DistributedDataParallel model(net, context); lockstep::Trainer trainer(&net, model, optimizer, context, {.epochs = 2});"}
        for name, body in wrong.items():
            with self.subTest(name):
                done = self.compiled("stack.cpp", program % body)
                self.assertNotEqual(done.returncode, 0)
                self.assertEqual(len(re.findall(r"error:", done.stderr)), 1, done.stderr[:4000])
                self.assertIn("a bare pointer does not say who keeps the module: give the object itself, *pointer", done.stderr)
                self.assertLess(done.stderr.count("\n"), 15, done.stderr)
        shared = "lockstep::Ema ema(net); auto shared = std::make_shared<Net>();\n" + model % ("shared", "")
        trainer = """lockstep::Trainer trainer(net, optimizer, context, {.epochs = 2}); trainer.model();
              lockstep::DistributedDataParallel model(net, context); lockstep::Trainer attached(net, model, optimizer, context, {.epochs = 2});"""
        for name, body in {"shared": shared, "object": model % ("net", ""), "trainer": trainer}.items():
            done = self.compiled(name + ".cpp", program % body)
            self.assertEqual(done.returncode, 0, done.stderr[:4000])

    @thorough
    def test_each_one_alone(self):
        """Without the precompiled header, which might hold what a header forgets to include."""
        command = [word for word in self.command if word != "-include" and not word.endswith("cmake_pch.hxx")]

        def alone(name):
            done = self.compiled(name.replace(".h", ".cpp"), f"#include <lockstep/{name}>\n", PEDANTIC, command=command)
            return name, done.stderr if done.returncode else ""

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            wrong = {name: said[:2000] for name, said in pool.map(alone, HEADERS) if said}
        self.assertEqual(wrong, {})
        for name in ("c.h", "train_c.h"):
            c = subprocess.run(["cc", "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-I" + INCLUDE, "-x", "c",
                                os.path.join(INCLUDE, "lockstep", name)], capture_output=True, text=True)
            self.assertEqual(c.returncode, 0, c.stderr)


if __name__ == "__main__":
    main()
