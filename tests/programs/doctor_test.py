"""`lockstep doctor` as a user meets it."""

import json
import os
import shutil
import tempfile
import unittest

from support import BIN, BUILD, LOCKSTEP, environment, main, run, thorough


class Doctor(unittest.TestCase):
    def test_this_machine_works(self):
        result = run(LOCKSTEP, "doctor", "--json", check=False, timeout=300)
        found = json.loads(result.stdout)
        broken = [finding for finding in found["findings"] if finding["level"] == "broken"]
        self.assertEqual((result.returncode, broken), (0, []), result.stdout)
        self.assertEqual(found["machine"]["cores"]["usable"], len(os.sched_getaffinity(0)))
        self.assertEqual(found["machine"]["system"]["kernel"].split()[1], os.uname().release)
        self.assertRegex(found["probe"]["torch"]["version"], r"^2\.1[1-3]\.")
        self.assertEqual(found["probe"]["backend"], "shm")
        self.assertLess(found["probe"]["gradients"]["relative_difference"], 1e-12)
        self.assertEqual(found["probe"]["gradients"]["parameters"], 4)
        self.assertTrue(found["probe"]["all_reduce"]["correct"])
        self.assertGreater(found["probe"]["all_reduce"]["triad_gb_per_s"], 0.1)
        for name, package in (("mpirun.openmpi", "Open MPI"), ("mpirun.mpich", "MPICH")):
            if shutil.which(name):
                self.assertIn(package, found["machine"]["launchers"][name])

    def test_without_its_helper_as_in_a_package_nothing_is_broken(self):
        with tempfile.TemporaryDirectory() as folder:
            alone = shutil.copy(LOCKSTEP, folder)
            said = run(alone, "doctor").stdout
            self.assertNotIn("broken", said)
            self.assertIn("  LibTorch    not checked", said)
            self.assertIn("note: the checks that need LibTorch were left out: lockstep-doctor-probe is neither beside", said)
            self.assertIn("-> this is not an error: packages leave it out", said)
            self.assertIn("  cores ", said)
            levels = {finding["level"] for finding in json.loads(run(alone, "doctor", "--json").stdout)["findings"]}
            self.assertNotIn("broken", levels)

    def test_it_works_where_cmake_has_installed_it(self):
        # README installs with `cmake --install`. LibTorch may lie within the project (.venv), whose folders CMake by itself keeps no path to.
        with tempfile.TemporaryDirectory() as folder:
            for component in ("launcher", "this_machine"):
                run("cmake", "--install", BUILD, "--prefix", folder, "--component", component)
            result = run(os.path.join(folder, "bin", "lockstep"), "doctor", "--json", check=False, timeout=300)
            found = json.loads(result.stdout)
            broken = [finding for finding in found["findings"] if finding["level"] == "broken"]
            self.assertEqual((result.returncode, broken), (0, []), result.stdout)
            self.assertEqual(found["probe"]["backend"], "shm")

    def test_a_helper_without_its_libtorch_says_what_to_do(self):
        with tempfile.TemporaryDirectory() as folder:
            alone, probe = shutil.copy(LOCKSTEP, folder), os.path.join(folder, "lockstep-doctor-probe")
            with open(probe, "w") as file:
                file.write("#!/bin/sh\necho 'x: error while loading shared libraries: libtorch_cpu.so: cannot open shared object file' >&2\nexit 127\n")
            os.chmod(probe, 0o755)
            result = run(alone, "doctor", check=False)
            self.assertEqual(result.returncode, 1)
            self.assertIn(f"broken: two ranks of {probe} do not work: they do not find libtorch_cpu.so\n", result.stdout)
            self.assertIn("LD_LIBRARY_PATH=", result.stdout)

    def test_a_helper_that_fails_is_said(self):
        with tempfile.TemporaryDirectory() as folder:
            alone, probe = shutil.copy(LOCKSTEP, folder), os.path.join(folder, "lockstep-doctor-probe")
            for text, expected in (("#!/bin/sh\necho no libtorch >&2\nexit 3\n", "no libtorch"), ("#!/bin/sh\necho garbage\n", "garbage")):
                with open(probe, "w") as file:
                    file.write(text)
                os.chmod(probe, 0o755)
                result = run(alone, "doctor", check=False)
                self.assertEqual(result.returncode, 1)
                self.assertIn(expected, result.stdout)
                self.assertIn("broken: two ranks of", result.stdout)

    def test_limits_are_found(self):
        result = run("sh", "-c", f"ulimit -f 100000; ulimit -n 900; exec {LOCKSTEP} doctor --json", check=False, env=environment(), timeout=300)
        whats = [finding["what"] for finding in json.loads(result.stdout)["findings"]]
        self.assertTrue(any("may open only 900 files" in what for what in whats), whats)
        self.assertTrue(any("files may hold only 51200000 bytes" in what or "files may hold only 102400000 bytes" in what for what in whats), whats)

    @thorough
    def test_bits_are_the_same_in_each_run_and_compared_with_another_machine_s(self):
        here = json.loads(run(LOCKSTEP, "doctor", "--json", timeout=300).stdout)
        bits = here["probe"]["bits"]
        self.assertGreaterEqual(len(set(bits["operators"].values())), 13)
        with tempfile.TemporaryDirectory() as folder:
            other = os.path.join(folder, "other.json")

            def compared(machine):
                with open(other, "w") as file:
                    file.write(machine)
                return json.loads(run(LOCKSTEP, "doctor", "--json", "--compare", other, timeout=300).stdout)["findings"]

            self.assertEqual(compared(json.dumps(here)), here["findings"])
            there = json.loads(json.dumps(here))
            there["probe"]["bits"]["operators"]["matmul"] = "0"
            there["probe"]["torch"]["cpu_capability"] = "DEFAULT"
            found = compared(json.dumps(there))[-1]
            self.assertEqual(found["what"], "the other machine gives different bits in matmul")
            self.assertIn('and "DEFAULT" there', found["advice"])
            for garbage in ("", "[]", "{}", '{"probe": 1}', '{"probe": {"bits": {"operators": []}}}'):
                self.assertIn("cannot be compared", compared(garbage)[-1]["what"], garbage)
        capped = json.loads(run(LOCKSTEP, "doctor", "--json", timeout=300, env={**os.environ, "ATEN_CPU_CAPABILITY": "default"}).stdout)["probe"]["bits"]
        self.assertEqual(capped["ATEN_CPU_CAPABILITY"], "default")
        self.assertNotEqual(capped["operators"], bits["operators"])

    def test_the_block_is_for_people(self):
        result = run(os.path.join(BIN, "lockstep"), "doctor", timeout=300)
        for word in ("LibTorch", "backends", "gradients", "bandwidth", "NUMA", "launchers", "GB/s", "bits"):
            self.assertIn(word, result.stdout)


if __name__ == "__main__":
    main()
