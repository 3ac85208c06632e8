"""The packages that cpack makes: what is in them, what they need, and that they work where they are unpacked."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BUILD, SOURCE, environment, main, run  # noqa: E402

# What Debian's Depends must bring; everything else that a bare system lacks is a mistake.
MAY_NEED = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libz.so.1", "libssl.so.3", "libcrypto.so.3", "ld-linux-x86-64.so.2"}


def needed(path):
    dynamic = run("readelf", "-d", path).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))


def documented(language, document="docs/c.md"):
    with open(os.path.join(SOURCE, document)) as file:
        return re.findall(rf"^```{language}\n(.*?)^```", file.read(), re.MULTILINE | re.DOTALL)[0]


class Packages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if shutil.which("cpack") is None or shutil.which("dpkg-deb") is None:
            raise unittest.SkipTest("cpack or dpkg-deb is not installed")
        cls.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        run("cpack", "--config", os.path.join(BUILD, "CPackConfig.cmake"), "-B", cls.folder, timeout=300, cwd=BUILD)
        files = sorted(os.listdir(cls.folder))
        cls.deb, = [os.path.join(cls.folder, name) for name in files if name.endswith(".deb")]
        cls.tar, = [os.path.join(cls.folder, name) for name in files if name.endswith(".tar.gz")]
        cls.root = os.path.join(cls.folder, "root")
        run("dpkg-deb", "-x", cls.deb, cls.root)
        cls.usr = os.path.join(cls.root, "usr")

    def path(self, name):
        return os.path.join(self.usr, name)

    def files(self):
        return {os.path.relpath(os.path.join(root, name), self.usr) for root, _, names in os.walk(self.usr) for name in names}

    def test_both_hold_everything(self):
        files = self.files()
        for name in ("bin/lockstep", "lib/liblockstep.a", "lib/liblockstep_c.so.1", "libexec/lockstep/lockstep-tour", "include/lockstep/lockstep.h", "include/lockstep/c.h",
                     "lib/cmake/Lockstep/LockstepConfig.cmake", "lib/cmake/LockstepC/LockstepCConfig.cmake", "lib/pkgconfig/lockstep_c.pc",
                     "share/man/man1/lockstep.1", "share/man/man1/lockstep-run.1", "share/bash-completion/completions/lockstep",
                     "share/zsh/vendor-completions/_lockstep", "share/fish/vendor_completions.d/lockstep.fish", "share/doc/lockstep/copyright", "share/doc/lockstep/sbom.cdx.json"):
            self.assertIn(name, files)
        with tarfile.open(self.tar) as archive:
            inside = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
        self.assertEqual(inside, files)

    def test_they_hold_no_place_of_this_machine(self):
        with open(os.path.join(BUILD, "CMakeCache.txt")) as file:
            torch, = re.findall(r"(?m)^Torch_DIR:\w+=(.*)/share/cmake/Torch$", file.read())
        self.assertNotIn("libexec/lockstep/lockstep-doctor-probe", self.files())
        texts = [name for name in self.files() if not re.match(r"(bin|lib|libexec/lockstep)/[^/]+$", name)]
        self.assertGreater(len(texts), 20)
        for name in texts:
            with open(self.path(name), encoding="utf-8") as file:
                content = file.read()
            for place in (torch, BUILD, "@CMAKE"):
                self.assertFalse(place in content, f"{name} names {place}")
        for name in ("bin/lockstep", "lib/liblockstep_c.so.1"):
            self.assertNotRegex(run("readelf", "-d", self.path(name)).stdout, "RPATH|RUNPATH")

    def test_debian_knows_what_they_need(self):
        fields = run("dpkg-deb", "-f", self.deb).stdout
        depends, = re.findall(r"(?m)^Depends: (.*)$", fields)
        self.assertEqual({part.split()[0] for part in depends.split(", ")}, {"libc6", "libgcc-s1", "libssl3", "libstdc++6", "zlib1g"})
        for name in ("bin/lockstep", "lib/liblockstep_c.so.1", "libexec/lockstep/lockstep-tour"):
            self.assertLessEqual(needed(self.path(name)), MAY_NEED, name)

    def test_the_launcher_and_the_library_for_c_work(self):
        bare = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": self.path("lib"), "HOME": self.folder}
        launcher = self.path("bin/lockstep")
        self.assertIn("LibTorch: 2.", run(launcher, "--version", env=bare).stdout)
        with open(os.path.join(self.folder, "mean.c"), "w") as file:
            file.write(documented("c"))
        run("cc", "-std=c99", "mean.c", "-o", "mean", f"-I{self.path('include')}", f"-L{self.path('lib')}", "-llockstep_c", cwd=self.folder)
        for ranks, mean in ((2, "0.5"), (3, "1")):
            said = run(launcher, "run", "-n", ranks, "--", "./mean", cwd=self.folder, env=bare).stdout
            self.assertEqual(said, f"mean over {ranks} ranks: {mean}\n")

    def losses(self, folder):
        """The loss of each of the last steps, as rank 0 wrote it, to the last digit."""
        with open(os.path.join(self.folder, folder, "metrics_rank0.jsonl")) as file:
            lines = [json.loads(line) for line in file]
        of_step = {line["step"]: line["value"] for line in lines if line["type"] == "scalar" and line["name"] == "train/loss"}
        return [of_step[step] for step in range(800, 901)]

    def test_the_tour_kills_resumes_resizes_and_reports(self):
        bare = {"PATH": "/usr/bin:/bin", "HOME": self.folder}
        tour = run("sh", "-c", f"{self.path('bin/lockstep')} tour 2>&1", env=bare, cwd=self.folder, timeout=120)
        said = tour.stdout
        first_steps = said.index("  step ")
        self.assertEqual(re.findall(r"(?m)^lockstep: .*", said[:first_steps]), [], "no warning before anything has happened")
        losses = [float(value) for value in re.findall(r"step +\d+ of 900 on \d ranks, loss (\S+)", said)]
        self.assertGreater(len(losses), 8)
        self.assertLess(losses[-1], losses[0] / 2)
        for step in ("kill -9", "the run has 3 ranks", "start 3; before it", "runs/tour/report.html"):
            self.assertIn(step, said)
        with open(os.path.join(self.folder, "runs/tour/starts.jsonl")) as file:
            starts = [json.loads(line) for line in file]
        self.assertEqual([start["ranks"] for start in starts], [2, 2, 3])
        with open(os.path.join(self.folder, "runs/tour/report.html")) as file:
            page = file.read()
        self.assertEqual(re.findall(r"<h2[^>]*>([\w ]+)<", page), ["Loss", "Throughput", "Communication", "Starts", "System", "Command and files"])
        self.assertEqual(re.findall(r'<p class="missing">(.*?)</p>', page),
                         ["Not recorded: accuracy (log.scalar(&quot;valid/accuracy&quot;, accuracy)); late ranks, buckets, one step, rank by rank (log.watch(model))."])
        # Kills and resizes have left no trace in the result: one rank alone comes to the same loss.
        run(self.path("bin/lockstep"), "run", "-n", 1, "--virtual-ranks", 6, "--run-dir", "alone", "--", self.path("libexec/lockstep/lockstep-tour"),
            env=bare, cwd=self.folder)
        self.assertEqual(self.losses("runs/tour"), self.losses("alone"))
        again = run(self.path("bin/lockstep"), "tour", "-o", "runs/tour", env=bare, cwd=self.folder, check=False)
        self.assertEqual(again.returncode, 48)
        self.assertIn("give the name of a new folder", again.stderr)

    def configure(self, name, **variables):
        project = os.path.join(self.folder, name)
        os.mkdir(project)
        for file_name, content in (("train.cpp", documented("cpp", "README.md")), ("CMakeLists.txt", documented("cmake", "README.md"))):
            with open(os.path.join(project, file_name), "w") as file:
                file.write(content)
        return run("cmake", "-B", "build", f"-DCMAKE_PREFIX_PATH={self.usr}", *(f"-D{key}={value}" for key, value in variables.items()),
                   cwd=project, env=environment(), check=False)

    def test_the_cpp_library_takes_the_torch_that_it_is_given(self):
        with open(os.path.join(BUILD, "CMakeCache.txt")) as file:
            folder, = re.findall(r"(?m)^Torch_DIR:\w+=(.*)$", file.read())
        said = self.configure("given", Torch_DIR=folder)
        self.assertEqual(said.returncode, 0, said.stderr)
        if os.environ.get("LOCKSTEP_NIGHTLY") == "1":  # programs.consumer builds it against a whole installation
            run("cmake", "--build", "build", cwd=os.path.join(self.folder, "given"), timeout=400)

    def test_another_minor_version_of_torch_is_refused(self):
        other = os.path.join(self.folder, "other_torch")
        os.mkdir(other)
        for name, content in (("TorchConfig.cmake", "set(Torch_FOUND TRUE)\nset(Torch_VERSION 2.7.1)\n"),
                              ("TorchConfigVersion.cmake", "set(PACKAGE_VERSION 2.7.1)\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n")):
            with open(os.path.join(other, name), "w") as file:
                file.write(content)
        said = self.configure("other", Torch_DIR=other)
        self.assertNotEqual(said.returncode, 0)
        self.assertRegex(" ".join(said.stderr.split()), r"was built with LibTorch 2\.1\d\.\d.*, but .*other_torch holds 2\.7\.1; give the folder of")

    def test_the_bill_of_materials_names_all_that_is_linked(self):
        with open(self.path("share/doc/lockstep/sbom.cdx.json")) as file:
            bom = json.load(file)
        self.assertEqual((bom["bomFormat"], bom["specVersion"]), ("CycloneDX", "1.5"))
        components = {one["bom-ref"]: one for one in bom["components"]}
        self.assertEqual(len(components), len(bom["components"]))
        self.assertEqual(set(bom["dependencies"][0]["dependsOn"]), set(components))
        known = {one["value"] for component in components.values() for one in component.get("properties", [])}
        for name in ("bin/lockstep", "lib/liblockstep_c.so.1.2", "libexec/lockstep/lockstep-tour"):
            self.assertLessEqual(needed(self.path(name)), known)
        ours = {name for name, component in components.items() if component["type"] == "file"}
        self.assertLessEqual({"bin/lockstep", "lib/liblockstep.a", "lib/liblockstep_c.so.1.2"}, ours)
        for name in ours:
            with open(self.path(name), "rb") as file:
                self.assertEqual(components[name]["hashes"][0]["content"], hashlib.sha256(file.read()).hexdigest(), name)
        for name in set(components) - ours - {"glibc"}:
            self.assertRegex(components[name]["version"], r"^\d", name)
        # What the C++ library asks its users to link.
        with open(self.path("lib/cmake/Lockstep/LockstepTargets.cmake")) as file:
            linked = set(re.findall(r"LINK_ONLY:(\w+)::", file.read()))
        self.assertEqual({name.lower() for name in linked} - {"threads"}, {"zlib", "libarchive", "jpeg", "png"})
        self.assertLessEqual({"zlib", "libarchive", "libjpeg", "libpng", "libtorch"}, set(components))


if __name__ == "__main__":
    main()
