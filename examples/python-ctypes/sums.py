"""Sums over ranks from Python, by ctypes, with numpy alone:   lockstep run -n 2 -- python3 sums.py"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_void_p

import numpy as np

library = ctypes.CDLL("liblockstep_c.so.1")
library.lockstep_last_error.restype = c_char_p
library.lockstep_join.argtypes = [c_void_p, POINTER(c_void_p)]
library.lockstep_all_reduce.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_int32, c_void_p]
for name in ("leave", "rank", "size"):
    getattr(library, f"lockstep_{name}").argtypes = [c_void_p]
    getattr(library, f"lockstep_{name}").restype = c_int

DTYPES = {"float32": 0, "float64": 1, "float16": 2, "int8": 4, "uint8": 5, "int16": 6, "int32": 7, "int64": 8}
OPS = {"sum": 0, "mean": 1, "product": 2, "min": 3, "max": 4}


def check(status):
    if status != 0:
        raise RuntimeError(library.lockstep_last_error().decode())


class World:
    """All ranks; `with World() as world` leaves in the end."""

    def __enter__(self):
        self.group = c_void_p()
        check(library.lockstep_join(None, byref(self.group)))
        self.rank, self.size = library.lockstep_rank(self.group), library.lockstep_size(self.group)
        return self

    def __exit__(self, *exception):
        check(library.lockstep_leave(self.group))

    def all_reduce(self, array, op="sum"):
        """Replaces the array's elements by their sums (or means, ...) over all ranks."""
        if not array.flags.c_contiguous:
            raise ValueError("all_reduce takes contiguous arrays")
        check(library.lockstep_all_reduce(self.group, array.ctypes.data, array.ctypes.data, array.size,
                                          DTYPES[array.dtype.name], OPS[op], None))


with World() as world:
    states, state = [], world.rank
    for _ in range(1000):
        state = (state * 1664525 + 1013904223) % 2**32
        states.append(state >> 8)
    values = np.array(states, dtype=np.float32) / np.float32(16777216) - np.float32(0.5)
    world.all_reduce(values)
    hash = 2166136261
    for bits in values.view(np.uint32).tolist():
        hash = (hash ^ bits) * 16777619 % 2**32
    if world.rank == 0:
        print(f"sums {hash:08x} over {world.size} ranks")
