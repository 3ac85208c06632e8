"""Fuzzes what the launcher and its ranks read of others: environment, command lines, what ranks send it.

A million executions each, or ten seconds where that is sooner; LOCKSTEP_NIGHTLY=1: always the million.
"""

import os
import struct

from fuzzing import FuzzTest
from support import main

RUNS = 1_000_000
SECONDS = 1800 if os.environ.get("LOCKSTEP_NIGHTLY") else 10
LEAST = RUNS if os.environ.get("LOCKSTEP_NIGHTLY") else 1000


def lines(*words):
    return "\n".join(words).encode()


class Environment(FuzzTest):
    words = ["0", "1", "2", "True", "127.0.0.1", "29500", "RANK=", "WORLD_SIZE=", "MASTER_ADDR=", "2147483648", "-1"]

    def test_environment(self):
        empty = [""]
        self.fuzz("fuzz_environment", {
            "launcher": lines("9", "1", "2", "1", "2"),
            "torchrun": lines("", "1", "2", "1", "2", "127.0.0.1", "29500", "True", "0", "run"),
            "open_mpi": lines(*empty * 10, "1", "2", "1", "2"),
            "mpich": lines(*empty * 14, "1", "2", "1", "2"),
            "slurm": lines(*empty * 18, "0", "1", "2", "1", "1"),
        }, SECONDS, RUNS, max_len=1024, least=LEAST)


class CommandLine(FuzzTest):
    words = ["-n", "auto", "--max-restarts", "--restarts-per-hour", "--elastic", "2:4", "--log-dir", "--run_dir", "--tee", "all", "0,1-2", "--grace", "--hang-timeout", "off", "--env",
             "A=b", "RANK=1", "--bind", "core", "numa", "none", "--debugger", "--dry-run", "--", "--ranks", "--ranks=2", "--nproc_per_node",
             "--standalone", "--no-python", "--help", "--nnodes", "\\x0a"]

    def test_command_line(self):
        self.fuzz("fuzz_command_line", {
            "plain": lines("-n", "2", "--", "train", "--epochs", "3"),
            "long": lines("--nproc_per_node=auto", "--max_restarts", "3", "--tee=0,1-2", "--bind", "core", "--env", "A=b", "train"),
            "debugger": lines("-n", "4", "--debugger", "1", "--hang-timeout", "off", "--grace", "0.5", "--dry-run", "train"),
            "own": lines("./train", "--ranks", "4", "--epochs", "3", "--", "--ranks"),
        }, SECONDS, RUNS, max_len=512, least=LEAST)


class KeyValueStore(FuzzTest):
    def test_key_value_frames(self):
        def frame(number, code, *fields):
            body = struct.pack("<IB", number, code) + b"".join(struct.pack("<I", len(field)) + field for field in fields)
            return struct.pack("<I", len(body)) + body

        self.fuzz("fuzz_key_value", {
            "set_get": frame(1, 0, b"key", b"value") + frame(2, 1, b"key"),
            "add": frame(1, 2, b"n", b"5") + frame(2, 2, b"n", b"-7"),
            "compare_delete": frame(1, 3, b"key", b"", b"new") + frame(2, 4, b"key"),
            "wait_cancel": frame(1, 6, b"a", b"b") + frame(1, 9) + frame(2, 5, b"a") + frame(3, 7),
            "append": frame(1, 8, b"key", b"value") + frame(2, 8, b"key", b"more"),
        }, SECONDS, RUNS, max_len=2048, least=LEAST)


class ErrorFile(FuzzTest):
    words = ["message", "extraInfo", "py_callstack", "timestamp", "null", "true", "1e400", "\\\\u0000"]

    def test_error_file(self):
        self.fuzz("fuzz_error_file", {
            "ours": b'{"message": {"message": "what", "extraInfo": {"py_callstack": "what", "timestamp": "1"}}}',
            "plain": b'{"message": "what"}',
            "deep": b"[" * 1000,
        }, SECONDS, RUNS, max_len=4096, least=LEAST)


if __name__ == "__main__":
    main()
