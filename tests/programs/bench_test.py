"""The benches in their tiny modes: the shape of what they write, and that no system is dropped silently."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

from support import BIN, BUILD, SOURCE, environment, main, run

BENCH = os.path.join(SOURCE, "bench")
SYSTEMS = ("shm", "gloo", "mpich", "openmpi", "openmpi-debian", "impi")


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

    def test_sync_batch_norm(self):
        path = os.path.join(self.folder, "sync_batch_norm.json")
        for ranks in (2, 3):
            run(os.path.join(BIN, "lockstep"), "run", "-n", ranks, "--", os.path.join(BIN, "bench_sync_batch_norm"), "--tiny", "--json", path)
            figures = self.read(path)
            self.assertEqual((figures["ranks"], figures["layers"], figures["values_a_layer"]), (ranks, 4, 16 * 64 * 4 * 4))
            self.assertLess(0, figures["batch_norm_ms"])
            self.assertLess(0, figures["sync_batch_norm_ms"])

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
        for ranks in (2, 3):
            run(os.path.join(BIN, "lockstep"), "run", "-n", ranks, "--", os.path.join(BIN, "bench_sharded_step"), "--tiny", "--json", path)
            rows = {row["system"]: row for row in self.read(path)}
            self.assertEqual(set(rows), {"libtorch", "alone", "sharded", "shared"})
            for row in rows.values():
                self.assertEqual(row["ranks"], ranks)
                self.assertLess(0, row["min_ms"])

    def test_step(self):
        # Small models: the checks of results are the same for all.
        for model, optimizer in (("small_1000", "sgd"), ("mlp", "adamw")):
            with self.subTest(model=model, optimizer=optimizer):
                self.try_step(model, optimizer)

    def try_step(self, model, optimizer):
        path = os.path.join(self.folder, f"step_{model}.json")
        messages = run(os.path.join(BIN, "bench_step"), "--tiny", "--models", model, "--optimizers", optimizer, "--json", path,
                       timeout=600).stderr
        figures = self.read(path)
        rows = {row["system"]: row for row in figures["rows"]}
        for row in figures["rows"]:
            self.assertEqual((row["model"], row["optimizer"]), (model, optimizer))
        for system in ("side_by_side", "side_by_side_fused", "lockstep", "lockstep_sharded", "lockstep_shared", "c10d_reducer_gloo"):
            self.assertIn(system, rows, figures["failed"])
        for system in ("pytorch_ddp_gloo", "pytorch_zero_gloo", "pytorch_ddp_lockstep"):
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
