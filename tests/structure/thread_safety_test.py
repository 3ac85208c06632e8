"""scripts/thread_safety, which make lint runs, refuses what it should: without that its silence would mean nothing."""

import importlib.machinery
import importlib.util
import os
import re
import sys
import tempfile
import unittest

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.dont_write_bytecode = True
LOADER = importlib.machinery.SourceFileLoader("thread_safety", os.path.join(SOURCE, "scripts", "thread_safety"))
thread_safety = importlib.util.module_from_spec(importlib.util.spec_from_loader("thread_safety", LOADER))
LOADER.exec_module(thread_safety)

COUNTER = """
#include "base/mutex.h"
using lockstep::MutexLock;
struct Counter {
  void add_locked() LOCKSTEP_REQUIRES(mutex) { ++count; }
  lockstep::Mutex mutex;
  std::condition_variable changed;
  int count LOCKSTEP_GUARDED_BY(mutex) = 0;
};
"""
RIGHT = [
    "MutexLock lock(mutex); ++count; add_locked();",
    "if (!mutex.try_lock()) return; add_locked(); mutex.unlock();",
    "MutexLock lock(mutex); while (count == 0) changed.wait(lock.native());",
    "MutexLock lock(mutex); lock.unlock(); lock.lock(); ++count;",
]
WRONG = [
    ("++count;", "requires holding mutex 'mutex'"),
    ("{ MutexLock lock(mutex); } ++count;", "requires holding mutex 'mutex'"),
    ("MutexLock lock(mutex); lock.unlock(); ++count;", "requires holding mutex 'mutex'"),
    ("if (mutex.try_lock()) mutex.unlock(); ++count;", "requires holding mutex 'mutex'"),
    ("add_locked();", "requires holding mutex 'mutex'"),
    ("mutex.lock(); ++count;", "still held at the end"),
]


@unittest.skipIf(thread_safety.find_clang() is None, "there is no clang++ here (scripts/setup --thorough installs one)")
class ThreadSafety(unittest.TestCase):
    def said_of(self, bodies):
        with tempfile.NamedTemporaryFile("w", suffix=".cpp") as file:
            file.write(COUNTER)
            for number, body in enumerate(bodies):
                file.write(f"struct Case{number} : Counter {{ void run() {{ {body} }} }};\n")
            file.flush()
            flags = ["-std=c++20", "-I" + os.path.join(SOURCE, "src")]
            return thread_safety.check(thread_safety.find_clang(), flags, [file.name])

    def test_what_holds_the_mutex_passes(self):
        result = self.said_of(RIGHT)
        self.assertEqual((result.returncode, result.stderr), (0, ""))

    def test_each_access_without_the_mutex_is_refused(self):
        result = self.said_of([body for body, _ in WRONG])
        self.assertNotEqual(result.returncode, 0)
        for number, (body, words) in enumerate(WRONG):
            line = COUNTER.count("\n") + 1 + number
            said = re.findall(rf":{line}:\d+: error: (.*)", result.stderr)
            self.assertEqual(len(said), 1, body + result.stderr)
            self.assertIn(words, said[0], body)

    def test_what_is_annotated_is_checked(self):
        files = thread_safety.annotated_files()
        for path in ("src/reducer/reducer.cpp", "src/data_parallel/block_cache.cpp", "src/nn/batch_norm_operator.cpp"):
            self.assertIn(path, files)


if __name__ == "__main__":
    unittest.main(argv=["thread_safety_test", "-v"])
