"""A Python that imports torch once and runs every script in a fork of itself: importing takes seconds, a fork
milliseconds."""

import atexit
import json
import os
import select
import subprocess
import tempfile

from support import environment

# Reads a request a line: {"script", "arguments", "folder", "output"}. Answers with the script's exit code.
SERVER = """
import json, os, sys, traceback
import torch
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            error = os.open(request["output"] + ".err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (error, 2)):
                os.dup2(source, target)
            os.chdir(request["folder"])
            sys.argv = ["-c", *request["arguments"]]
            exec(compile(request["script"], "<script>", "exec"), {"__name__": "__main__"})
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def read(path):
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read()


class TorchPython:
    """Scripts run one after another, each as `python -c SCRIPT ARGUMENT...` with one thread would."""

    def __init__(self, python):
        self.folder = tempfile.TemporaryDirectory(prefix="lockstep_python_")
        self.process = subprocess.Popen([python, "-W", "ignore", "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env=environment(OMP_NUM_THREADS="1"))
        atexit.register(self.close)

    def close(self):
        self.process.kill()
        self.process.communicate()
        self.folder.cleanup()

    def run(self, script, *arguments, cwd, timeout=300):
        """What the script prints. An AssertionError when it fails, or is not done in time."""
        output = os.path.join(self.folder.name, "output")
        request = {"script": script, "arguments": [str(word) for word in arguments], "folder": cwd, "output": output}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            self.close()
            raise AssertionError(f"the script is not done after {timeout} s\n{script}")
        code = self.process.stdout.readline().strip()
        out, err = read(output), read(output + ".err")
        if code != "0":
            raise AssertionError(f"the script ended with {code or 'nothing'}\n{script}\n{out}\n{err}")
        return out


_servers = {}


def in_torch_python(python, script, *arguments, cwd):
    if python not in _servers:
        _servers[python] = TorchPython(python)
    return _servers[python].run(script, *arguments, cwd=cwd)
