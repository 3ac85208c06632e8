"""Every command block of README and the documents, run unchanged and in order, in a tree where nothing is built.

A block of ```sh that cannot be run here says so in the comment before it: `<!-- not run: the reason -->`. What README
shows as files is put where it says.
"""

import os
import re
import shutil
import subprocess
import tempfile
import unittest

from support import SOURCE, environment, main, run

DOCUMENTS = ["README.md", "CONTRIBUTING.md", "python/README.md"] + sorted(
    os.path.join("docs", name) for name in os.listdir(os.path.join(SOURCE, "docs")) if name.endswith(".md"))
BLOCK = re.compile(r"(?:^<!-- not run: (?P<reason>.+?) -->\n+)?^```sh\n(?P<commands>.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`(?P<name>[\w./~-]+)`:\n\n```(?:cpp|cmake)\n(?P<content>.*?)^```", re.MULTILINE | re.DOTALL)
# How a line of a shell block begins; no such line may be in a block of another kind, which nobody runs.
COMMAND = re.compile(r"(\$ |make |cmake |python3? |pip |torchrun |mpirun |srun |lockstep |tensorboard |git |(\./)?(build|bench|scripts)/\S+( |$))")
LONGEST_S = 3000


def read(document):
    with open(os.path.join(SOURCE, document), encoding="utf-8") as file:
        return file.read()


def tracked_files():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=SOURCE, capture_output=True, text=True)
    if listing.returncode == 0 and listing.stdout:
        return [name for name in listing.stdout.split("\0") if name and os.path.exists(os.path.join(SOURCE, name))]
    left_out = {"build", ".venv", ".setup", "runs", ".git", "__pycache__"}
    return [os.path.relpath(os.path.join(root, name), SOURCE) for root, folders, names in os.walk(SOURCE)
            if not folders.__setitem__(slice(None), [f for f in folders if f not in left_out]) for name in names]


class DocumentedCommands(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lockstep_clone_", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.clone, self.home = os.path.join(folder.name, "clone"), os.path.join(folder.name, "home")
        os.mkdir(self.home)

    def make_clone(self):
        """The tree as git has it, beside this one, with the LibTorch of this one."""
        for name in tracked_files():
            os.makedirs(os.path.dirname(os.path.join(self.clone, name)), exist_ok=True)
            shutil.copy(os.path.join(SOURCE, name), os.path.join(self.clone, name))
        with open(os.path.join(SOURCE, ".setup/torch_dir"), encoding="utf-8") as file:
            variables = {"HOME": self.home, "TORCH_DIR": file.read().strip()}
        # A compiler cache knows files by their paths. If this process may mount, the clone takes this tree's place.
        mounts = f'mount --make-rprivate / && mount --bind "{self.clone}" "{SOURCE}" && cd "{SOURCE}"'
        venv = os.path.join(SOURCE, ".venv")
        if os.path.isdir(venv):
            os.mkdir(os.path.join(self.clone, ".venv"))
            mounts = f'mount --bind "{os.path.realpath(venv)}" "{self.clone}/.venv" && ' + mounts.replace("--bind", "--rbind")
        may_mount = run("unshare", "-m", "bash", "-c", mounts, check=False).returncode == 0
        self.prefix = f"{mounts}; " if may_mount else f'cd "{self.clone}"; '
        self.shell = ["unshare", "-m", "bash", "-euo", "pipefail", "-c"] if may_mount else ["bash", "-euo", "pipefail", "-c"]
        if "CCACHE_DIR" not in os.environ:
            variables["CCACHE_DIR"] = os.path.expanduser("~/.cache/ccache")
        self.environment = environment(**variables)
        self.environment.pop("LOCKSTEP_BUILD_DIR", None)

    def test_every_block_runs_as_it_stands(self):
        self.make_clone()
        ran, left_out = 0, []
        for document in DOCUMENTS:
            text = read(document)
            for file in FILE.finditer(text):
                path = file["name"].replace("~", self.home)
                if path != file["name"]:
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    with open(path, "w", encoding="utf-8") as target:
                        target.write(file["content"])
            for block in BLOCK.finditer(text):
                first = block["commands"].strip().splitlines()[0]
                if block["reason"]:
                    left_out.append(f"{document}: {first}: {block['reason']}")
                    continue
                with self.subTest(document=document, commands=block["commands"]):
                    done = run(*self.shell, self.prefix + block["commands"], timeout=LONGEST_S, env=self.environment, check=False)
                    self.assertEqual(done.returncode, 0, done.stdout[-4000:] + done.stderr[-4000:])
                    self.assertNotRegex(done.stdout + done.stderr, r"(?m)^\S+:\d+:\d+: warning:.*", "a build that a newcomer runs prints no warning")
                    ran += 1
        for line in left_out:
            print(f"SKIPPED BECAUSE of a block that is not run: {line}")
        print(f"{ran} blocks of commands ran, {len(left_out)} were left out")
        self.assertGreater(ran, 3, "README trains, installs and builds; docs/observing.md reports")

    def test_no_command_hides_in_another_kind_of_block(self):
        hidden = []
        for document in DOCUMENTS:
            language = None  # of the block this line is in
            for line in read(document).splitlines():
                if line.startswith("```"):
                    language = (line[3:] or "plain") if language is None else None
                elif COMMAND.match(line.strip()) and (language == "plain" or (language is None and line.startswith("    "))):
                    hidden.append(f"{document}: {line.strip()}")
        self.assertEqual(hidden, [], "blocks of commands begin with ```sh, so that they are run")


if __name__ == "__main__":
    main()
