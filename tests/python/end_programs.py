"""Ends of ranks that attach, in attach_test.py: each function is called as function(rank, size, backend) with the default group
made, and returns what the rank was told (None: nothing was to be told). Nobody waits for the others afterwards."""

import datetime
import os
import signal
import threading
import time

import torch.distributed as dist

import lockstep
from attach_programs import backward, network, raises


def leaves_before_attaching(rank, size, backend):
    dist.barrier()
    if rank == 1:
        return None
    return raises(lockstep.Error, "", lockstep.attach, network())


def leaves_before_attaching_with_a_timeout(rank, size, backend):
    dist.barrier()
    if rank == 1:
        return None
    return raises(lockstep.Error, "", lambda: lockstep.attach(network(), timeout=datetime.timedelta(seconds=30)))


def attaches_while_another_does_something_else(rank, size, backend):
    return raises(RuntimeError, "", dist.barrier) if rank == 1 else raises(lockstep.Error, "", lockstep.attach, network())


def steps_while_another_does_something_else(rank, size, backend):
    model = network()
    lockstep.attach(model)
    return raises(RuntimeError, "", dist.barrier) if rank == 1 else raises(lockstep.Error, "", backward, model, 0, rank)


def waits_as_long_as_the_group(rank, size, backend):
    return wait_in_vain(rank, dist.new_group(timeout=datetime.timedelta(seconds=2), backend=backend))


def waits_as_long_as_it_is_told(rank, size, backend):
    return wait_in_vain(rank, dist.new_group(backend=backend), timeout=datetime.timedelta(seconds=2))


def wait_in_vain(rank, group, **options):
    model = network()
    lockstep.attach(model, group, **options)
    if rank == 1:
        time.sleep(8)
        return None
    return raises(lockstep.Error, "", backward, model, 0, rank)


def trains_after_the_group_was_destroyed(rank, size, backend):
    model = network()
    lockstep.attach(model)
    dist.destroy_process_group()
    return raises(lockstep.Error, "", backward, model, 0, rank)


def interrupted(rank, size, backend, waiting):
    """Somebody presses Ctrl-C on rank 0, which waits for rank 1; the seconds it takes, and what the others are told."""
    model = network()
    if waiting != "attach":
        lockstep.attach(model)
    dist.barrier()
    if rank == 1:
        time.sleep(4)
        if backend == "gloo" or waiting == "attach":
            return None
        return raises(RuntimeError, "", backward, model, 0, rank)
    wait = {"attach": lambda: lockstep.attach(model), "backward": lambda: backward(model, 0, rank), "barrier": dist.barrier}[waiting]
    if rank != 0:
        return raises(RuntimeError, "", wait)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    pressed = []
    threading.Timer(1, lambda: (pressed.append(time.monotonic()), os.kill(os.getpid(), signal.SIGINT))).start()
    try:
        wait()
    except KeyboardInterrupt:
        return f"interrupted after {time.monotonic() - pressed[0]:.2f} s"
    return "not interrupted"


def waits_in_attach(rank, size, backend):
    return interrupted(rank, size, backend, "attach")


def waits_in_backward(rank, size, backend):
    return interrupted(rank, size, backend, "backward")


def waits_in_a_barrier(rank, size, backend):
    return interrupted(rank, size, backend, "barrier")
