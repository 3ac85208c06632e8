"""Mistakes of users: the program and the launcher say at once, before training, what is wrong and what to do."""

import gzip
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time

from support import LOCKSTEP, SOURCE, TRAIN, ProgramTest, environment, main, marked_processes, run, thorough, write_safetensors

SOON = 8  # seconds with a core to itself; a tenth of a second on an idle machine
STACKS = re.compile(r"frame #|Traceback|terminate called|what\(\):|Exception raised from|\.so[.+ (]|\[bt\]|0x[0-9a-f]{8}")
EXPLAIN = re.compile(r"(?m)^  explain   lockstep explain (\d+)$")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class BadInput(ProgramTest):
    def setUp(self):
        super().setUp()
        self.run_dir = os.path.join(self.folder, "run")
        self.mark = f"LOCKSTEP_TEST_MARK={self.folder}"

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def environment(self, **more):
        return environment(LOCKSTEP_TEST_MARK=self.folder, **{"OMP_NUM_THREADS": "1", **more})

    def explained_by(self, said):
        """The exit code under which a page explains the error; it is named once, and the page has it."""
        codes = EXPLAIN.findall(said)
        self.assertEqual(len(codes), 1, said)
        self.assertIn("\n\n  What to do: ", run(LOCKSTEP, "explain", codes[0]).stdout)
        return int(codes[0])

    def refused(self, command, code, parts, env=None, cwd=None, seconds=SOON):
        """The command ends in time with `code`, prints all of `parts`, shows no stack, trains nothing, leaves nothing."""
        start = time.monotonic()
        result = run(*command, check=False, timeout=60, env=self.environment(**env or {}), cwd=cwd or self.folder)
        took = time.monotonic() - start
        said = result.stderr
        for part in parts:
            self.assertIn(part, said, command)
        self.assertEqual(result.returncode, code, said)
        self.assertIsNone(STACKS.search(said), said)
        self.assertNotRegex(result.stdout + said, r"epoch \d|loss \d")
        if command[0] == LOCKSTEP:
            self.assertEqual(self.explained_by(said), code, said)
        processes_per_core = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
        self.assertLess(took, seconds * processes_per_core, command)
        self.assertEqual(marked_processes(self.mark), {})
        return said

    def train(self, *arguments, data=None):
        return [TRAIN, "--data", data or self.data, "--batch-size", 16, *arguments]

    def program_refuses(self, parts, *arguments, data=None, run_dir=None, code=49):
        """The training alone, and on two ranks, where the launcher ends with `code`."""
        command = self.train("--run-dir", run_dir or self.run_dir, *arguments, data=data)
        said = self.refused(command, 1, ["train_fashion_mnist: ", *parts])
        self.assertEqual(len(said.splitlines()), said.count("\n  ") + 1, said)  # one message, of one line or with a list
        self.assertEqual(self.explained_by(said), code, said)  # what the launcher would end with
        self.assertRegex(said.splitlines()[-1], EXPLAIN)
        self.refused([LOCKSTEP, "run", "-n", 2, "--run-dir", self.path("launched"), "--", *command], code,
                     ["of 2 failed first: exit code 1", *parts])
        self.assertFalse(os.path.exists(os.path.join(self.run_dir, "checkpoint.safetensors")))

    # ---- data ----

    def test_a_data_folder_that_is_not_there(self):
        self.program_refuses(["data folder 'nowhere' does not exist", "apt-get install dataset-fashion-mnist"], data="nowhere")

    def test_a_missing_file(self):
        os.remove(self.path("data", "t10k-labels-idx1-ubyte"))
        self.program_refuses(["contains neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz", self.data, "apt-get install"])

    def replace(self, name, content, suffix=""):
        """Changes one of the data files; returns its new path."""
        old = self.path("data", name)
        with open(old, "rb") as file:
            content = content(file.read())
        os.remove(old)
        with open(old + suffix, "wb") as file:
            file.write(content)
        return old + suffix

    def test_a_truncated_gzip_file(self):
        path = self.replace("train-images-idx3-ubyte", lambda raw: gzip.compress(raw)[:-1000], ".gz")
        self.program_refuses([path + ": is truncated", "512 x 28 x 28 elements", "expected, found"])

    def test_a_name_in_gz_that_is_no_gzip_file(self):
        path = self.replace("train-labels-idx1-ubyte", lambda raw: raw, ".gz")
        self.program_refuses([path + ": is not a gzip file: expected it to start with 1f 8b, found 00 00 08 01"])

    def test_a_gzip_file_without_gz(self):
        path = self.replace("train-labels-idx1-ubyte", gzip.compress)
        self.program_refuses([path + ": is not an IDX file", "this is gzip, so its name must end in .gz"])

    def test_a_file_that_is_too_long(self):
        path = self.replace("t10k-images-idx3-ubyte", lambda raw: raw + b"x")
        self.program_refuses([path + ": is too long", "99 x 28 x 28 elements", f"found {16 + 99 * 784 + 1} bytes"])

    def test_a_label_out_of_range(self):
        path = self.replace("train-labels-idx1-ubyte", lambda raw: raw[:-2] + b"\x0a" + raw[-1:])
        self.program_refuses([path + ": label 510 is 10, expected 0 to 9"])

    def test_fewer_labels_than_images(self):
        path = self.replace("train-labels-idx1-ubyte", lambda raw: raw[:4] + (511).to_bytes(4, "big") + raw[8:-1])
        self.program_refuses([path + ": expected 512 labels, as many as the images in train-images-idx3-ubyte, found 511"])

    def test_no_test_images(self):
        self.replace("t10k-labels-idx1-ubyte", lambda raw: raw[:4] + bytes(4))
        self.replace("t10k-images-idx3-ubyte", lambda raw: raw[:4] + bytes(4) + raw[8:16])
        self.program_refuses(["the dataset has no samples: size() of the lockstep::datasets::FashionMNIST is 0"], code=40)

    # ---- folders and files to write ----

    def test_a_run_folder_that_cannot_be_written(self):
        for folder in (self.path("data", "t10k-labels-idx1-ubyte", "below"), "/proc/lockstep"):
            self.program_refuses([f"cannot make the run folder {folder}: ", "choose another one"], run_dir=folder, code=48)

    def test_a_run_folder_of_the_launcher_that_cannot_be_written(self):
        below = self.path("data", "t10k-labels-idx1-ubyte", "below")
        for folder in (below, "/proc/lockstep"):
            self.refused([LOCKSTEP, "run", "-n", 2, "--run-dir", folder, "--", *self.train()], 48,
                         [f"cannot make the run folder {folder}: "])
        self.refused([LOCKSTEP, "run", "-n", 2, "--", "true"], 48, ["cannot make the run folder /proc/", "; choose another with --run-dir FOLDER"], cwd="/proc")

    def test_a_place_for_the_figures_that_cannot_be_written(self):
        for place in (self.path("missing", "out.json"), self.folder):
            self.program_refuses([f"the figures cannot be written to {place}", "--json"], "--json", place, code=40)

    def test_an_old_file_of_figures_survives_a_refused_run(self):
        with open(self.path("out.json"), "w") as file:
            file.write("old")
        self.program_refuses(["does not exist"], "--json", self.path("out.json"), data="nowhere")
        with open(self.path("out.json")) as file:
            self.assertEqual(file.read(), "old")

    # ---- options ----

    def test_options_of_the_program(self):
        for option, value in (("--batch-size", 0), ("--batch-size", -3), ("--epochs", 0), ("--epochs", -1)):
            self.refused([TRAIN, option, value], 105, [f"{option}: Value {value} not in range 1 to"])
        self.refused([TRAIN, "--epochs", "two"], 105, ["--epochs", "two"])
        self.refused([TRAIN, "--epoch", 2], 109, ["not expected: ", "--epoch", "--help"])
        self.refused([LOCKSTEP, "run", "-n", 2, TRAIN, "--batch-size", 0], 40, ["--batch-size: Value 0 not in range"])

    def test_a_batch_larger_than_what_there_is(self):
        self.refused([TRAIN, "--data", self.data, "--batch-size", 513], 1,
                     ["drop_last leaves no batch, because a rank's share is 512 of 512 samples, fewer than the batch_size of 513"])
        self.refused([LOCKSTEP, "run", "-n", 2, "--", TRAIN, "--data", self.data, "--batch-size", 257], 40,
                     ["a rank's share is 256 of 512 samples, fewer than the batch_size of 257; lower the batch size"])

    def test_number_of_ranks(self):
        for count in ("0", "-1", "x", "2x", "1.5", "99999999999"):
            self.refused([LOCKSTEP, "run", "-n", count, "--", *self.train()], 2, ["a whole number from 1 to", f"'{count}'", "Usage: "])

    def test_options_and_arguments_that_are_empty(self):
        # An empty value, as of a variable that is not set, counted as an option that was not given.
        for option in ("--key-file", "--interface", "--run-dir", "--log-dir", "--debugger", "--launch-command", "--env", "--bind", "--tee",
                       "--hosts", "--rendezvous", "--elastic", "--virtual-ranks", "--link-port", "--relay", "--np"):
            for words in ([option, ""], [f"{option}="]):
                self.refused([LOCKSTEP, "run", *words, "--dry-run", "--", "true"], 2, [f"{option} is empty; give it a value, "])
        self.refused([LOCKSTEP, "run", "-n", "", "--", "true"], 2, ["-n is empty; give it a value, N|auto|gpu, or leave it out"])
        self.refused([LOCKSTEP, "run", "--hosts", "a:1,", "--", "true"], 2, ["--hosts a:1, ends with a comma; name another machine"])
        join = [LOCKSTEP, "join", "--coordinator", "127.0.0.1:1"]
        for words, said in ((["--name", ""], "--name is empty; give it a value, NAME, or leave it out"),
                            (["--name=", "--key-file=key"], "--name is empty; give it a value, NAME, or leave it out"),
                            (["--key-file", ""], "--key-file is empty; give it a value, FILE, or leave it out")):
            self.refused([*join, *words], 2, [said])
        for words, said in ((["join", "--coordinator", ""], "--coordinator is empty; give it a value, HOST:PORT\n"),
                            (["tour", "-o", ""], "-o is empty"), (["report", "x", "-o", ""], "-o is empty"),
                            (["man", ""], "COMMAND is empty; give it a value, or leave it out"), (["status", ""], "RUN is empty"),
                            (["report", ""], "RUN is empty; give it a value\n"), (["inspect", ""], "FILE is empty"),
                            (["convert", "", "x.pt"], "FROM is empty"), (["convert", "x.pt", ""], "TO is empty"), (["resize", "", "2"], "RUN is empty"),
                            (["doctor", "--compare="], "--compare is empty"), (["explain", ""], "WHAT is empty")):
            self.refused([LOCKSTEP, *words], 2, [said])

    def test_commands(self):
        for words, code, part in ((["rnu"], 2, "unknown command 'rnu'"), (["report", "--foo"], 2, "has no option --foo"),
                                  (["inspect"], 2, "FILE is required"), (["inspect", "missing.pt"], 49, "cannot read missing.pt"),
                                  (["report", "missing"], 49, "there is no folder missing"),
                                  (["status", "missing"], 49, "no run is active in this folder")):
            said = self.refused([LOCKSTEP, *words], code, [part])
            self.assertRegex(said.splitlines()[-1], EXPLAIN)
        said = self.refused(self.train("--ranks", "x"), 2, ["it got 'x'"])
        self.assertEqual(self.explained_by(said), 2)

    def test_more_ranks_than_cores_are_warned_of_and_run(self):
        bound = "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); os.execv(sys.argv[1], sys.argv[1:])"
        result = run(sys.executable, "-c", bound, LOCKSTEP, "run", "-n", 2, "--", *self.train("--epochs", 1), cwd=self.folder)
        self.assertIn("2 ranks share 1 usable core; each computes with 1 thread", result.stderr)
        self.assertIn("test accuracy", result.stdout)

    def test_programs_that_cannot_be_started(self):
        program = self.path("program")
        with open(program, "w") as file:
            file.write("#!/bin/sh\n")
        launch = [LOCKSTEP, "run", "-n", 2, "--"]
        self.refused(launch + ["./nothing"], 46, ["no program ./nothing in " + self.folder])
        self.refused(launch + ["no-such-program"], 46, ["no program 'no-such-program' in PATH"])
        self.refused(launch + [program], 46, [program + " is not executable (chmod +x"])
        self.refused(launch + [self.folder], 46, [self.folder + " is a folder"])
        self.refused(launch, 2, ["no program is given"])
        os.chmod(program, stat.S_IRWXU)
        with open(program, "w") as file:
            file.write("#!/no/interpreter\n")
        self.refused(launch + [program], 46, ["the interpreter it names is missing"])

    # ---- ranks that fail ----

    def test_a_rank_that_throws_is_named_with_its_words(self):
        # Rank 0 compares its model with that of rank 1, which never arrives.
        script = 'if [ $RANK = 1 ]; then shift 2; set -- --data nowhere "$@"; fi; exec "$0" "$@"'
        said = self.refused([LOCKSTEP, "run", "-n", 2, "--", "sh", "-c", script, *self.train()], 49,
                            ["rank 1 of 2 failed first: exit code 1", "  | train_fashion_mnist: data folder 'nowhere' does not exist"],
                            seconds=SOON / 2)
        self.assertIn("its last line", said)

    def test_a_victim_that_ends_before_the_culprit_is_not_blamed(self):
        # Rank 1 has thrown and left the group, but its process ends a moment after rank 0's, which cannot go on.
        ended = self.path("rank_0_ended")
        script = (f'if [ $RANK = 0 ]; then "$0" "$@"; code=$?; : > {ended}; exit $code; fi; shift 2; "$0" --data nowhere "$@"; code=$?; '
                  f'while [ ! -e {ended} ]; do sleep 0.01; done; sleep 0.1; exit $code')
        said = self.refused([LOCKSTEP, "run", "-n", 2, "--", "sh", "-c", script, *self.train()], 49,
                            ["rank 1 of 2 failed first: exit code 1", "known by  rank 0, which says: rank 1 has already left the group",
                             "  | train_fashion_mnist: data folder 'nowhere' does not exist"], seconds=SOON / 2)
        self.assertNotIn("asked to stop", said)

    def test_a_rank_that_is_killed_is_named_with_the_signal(self):
        for number, name in ((signal.SIGKILL, "SIGKILL (Killed)"), (signal.SIGSEGV, "SIGSEGV")):
            process = subprocess.Popen([LOCKSTEP, "run", "-n", "2", "--", *map(str, self.train("--epochs", 10000))], cwd=self.folder,
                                       env=self.environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.addCleanup(lambda started=process: started.poll() is None and started.kill())
            process.stdout.readline()  # the first epoch is over
            victim = next(pid for pid, rank in marked_processes(self.mark).items() if rank == "1")
            start = time.monotonic()
            os.kill(victim, number)
            _, said = process.communicate(timeout=30)
            self.assertLess(time.monotonic() - start, SOON / 2)
            self.assertEqual(process.returncode, 41, said)
            self.assertIn("rank 1 of 2 failed first: killed by " + name, said)
            self.assertIsNone(STACKS.search(said), said)
            self.assertEqual(marked_processes(self.mark), {})

    # ---- checkpoints to resume from ----

    @thorough
    def test_resuming_from_what_is_no_checkpoint(self):
        missing, text = self.path("missing.safetensors"), self.path("notes.txt")
        with open(text, "w") as file:
            file.write("Remember to train the model.\n" * 10)
        self.program_refuses([f"cannot read {missing}: No such file"], "--resume", missing)
        self.program_refuses([f"cannot read {self.data}/checkpoint.safetensors: No such file"], "--resume", self.data)
        self.program_refuses([f"cannot load {text}: its header should take", "truncated, or not a .safetensors file"], "--resume", text)
        foreign = self.path("foreign.safetensors")
        write_safetensors(foreign, {"model.extra": ("F32", [1], bytes(4)), "model.classifier.2.bias": ("F32", [11], bytes(44))})
        self.program_refuses([f"cannot resume from {foreign}: the state does not fit the module:", "missing: features.0.weight",
                              "shape of classifier.2.bias: [11] given, [10] in the module", "unknown: extra"], "--resume", foreign)

    @thorough
    def test_resuming_from_a_checkpoint_of_this_program(self):
        done = self.path("done")
        run(*self.train("--epochs", 1, "--run-dir", done), cwd=self.folder)
        self.program_refuses([f"nothing is left to train: {done} has done 1 epochs of --epochs 1; raise --epochs"],
                             "--epochs", 1, "--resume", done, code=40)
        with open(os.path.join(done, "checkpoint.safetensors"), "rb") as file:
            whole = file.read()
        broken = self.path("broken.safetensors")
        for size in (0, 7, 8, 1000, len(whole) // 2, len(whole) - 1):
            with open(broken, "wb") as file:
                file.write(whole[:size])
            self.refused(self.train("--resume", broken), 1, ["cannot load " + broken])
        with open(broken, "wb") as file:
            file.write(whole.replace(b'"epochs_done":"1"', b'"epochs_done":"x"'))
        self.program_refuses([f"cannot resume from {broken}: it is not a checkpoint of this program", "epochs_done"], "--resume", broken, code=40)

    # ---- ranks that cannot find each other ----

    def test_variables_that_make_no_world(self):
        for variables, parts in (({"RANK": "0"}, ["WORLD_SIZE is not set although RANK is"]),
                                 ({"RANK": "5", "WORLD_SIZE": "2"}, ["RANK=5 contradicts WORLD_SIZE=2"]),
                                 ({"WORLD_SIZE": "abc"}, ["WORLD_SIZE=abc is not a whole number"]),
                                 ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR is not set", "set it to an address of rank 0's machine"]),
                                 ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
                                  ["MASTER_PORT=0 is not a whole number from 1 to 65535", "free port"]),
                                 ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "0.0.0.0", "MASTER_PORT": "29500"},
                                  ["rank 0 does not listen on 0.0.0.0", "set MASTER_ADDR to"]),
                                 ({"RANK": "0", "WORLD_SIZE": "2", "LOCKSTEP_STORE_FD": "77"}, ["LOCKSTEP_STORE_FD=77 is not open"]),
                                 ({"RANK": "0", "WORLD_SIZE": "2", "LOCKSTEP_STORE_FD": "0"},
                                  ["LOCKSTEP_STORE_FD=0 is not a socket of `lockstep run`"]),
                                 ({"LOCKSTEP_STORE_FD": "77"}, ["RANK and WORLD_SIZE are not set although LOCKSTEP_STORE_FD=77 is"]),
                                 ({"RANK": "0", "WORLD_SIZE": "1", "LOCKSTEP_JOIN_TIMEOUT_S": "2m"},
                                  ["LOCKSTEP_JOIN_TIMEOUT_S=2m is not a number of seconds"])):
            self.assertEqual(self.explained_by(self.refused(self.train(), 1, parts, env=variables)), 40)

    def ranks_that_wait(self, variables_of_rank, parts_of_rank, code):
        """Starts the ranks at once; each must give up in time, and say what `parts_of_rank` has for it, and `code`'s page."""
        start = time.monotonic()
        ranks = [subprocess.Popen([str(part) for part in self.train()], cwd=self.folder, stderr=subprocess.PIPE, text=True,
                                  env=self.environment(LOCKSTEP_JOIN_TIMEOUT_S="2", **variables_of_rank(rank)))
                 for rank in parts_of_rank]
        for process, parts in zip(ranks, parts_of_rank.values()):
            said = process.communicate(timeout=30)[1]
            self.assertEqual(process.returncode, 1)
            for part in parts:
                self.assertIn(part, said)
            self.assertIsNone(STACKS.search(said), said)
            self.assertEqual(self.explained_by(said), code, said)
        self.assertLess(time.monotonic() - start, 3 + SOON)

    def worlds_of_three(self):
        port = str(free_port())
        yield "torchrun", lambda rank: dict(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        yield "Open MPI", lambda rank: dict(OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE="3", OMPI_COMM_WORLD_LOCAL_SIZE="3",
                                            OMPI_COMM_WORLD_LOCAL_RANK=str(rank))

    def test_ranks_that_never_come_are_named(self):
        for name, variables in self.worlds_of_three():
            with self.subTest(name):
                self.ranks_that_wait(variables, {0: ["after 2 s 2 of 3 ranks had joined, missing rank 1"],
                                                 2: ["after 2 s 2 of 3 ranks had joined, missing rank 1"]}, 46)

    def test_a_rank_0_that_never_comes_is_named(self):
        for name, variables in self.worlds_of_three():
            with self.subTest(name):
                self.ranks_that_wait(variables, {1: ["rank 0", "see the output of rank 0", "LOCKSTEP_JOIN_TIMEOUT_S"]}, 46)


if __name__ == "__main__":
    main()
