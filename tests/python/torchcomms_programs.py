"""One rank of torchcomms_test.py: torchcomms_programs.py PROGRAM, with RANK, WORLD_SIZE and MASTER_* of a launcher."""

import copy
import faulthandler
import os
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torchcomms
from torchcomms import ReduceOp

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CPU = torch.device("cpu")
MACHINES = int(os.environ.get("MACHINES", "1"))
LONG_S = 100
SOON_S = 5  # in which all ranks must know of a failure


def communicator(name="all", **more):
    return torchcomms.new_comm("lockstep", CPU, name, **more)


def end_at(seconds):
    """Then the process tells where it is, and ends."""
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(seconds)


def error_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it passed")


def equal(result, expected):
    assert torch.equal(result, torch.as_tensor(expected, dtype=result.dtype).expand_as(result)), (result, expected)


def rows(rank, count=3):
    """What a rank contributes: `count` numbers that no other rank has."""
    return torch.arange(count, dtype=torch.float) + 100 * (rank + 1)


def reductions(comm, done):
    total = sum(rows(rank) for rank in range(SIZE))
    products = torch.stack([rows(rank) for rank in range(SIZE)]).prod(0)
    for op, expected in ((ReduceOp.SUM, total), (ReduceOp.AVG, total / SIZE), (ReduceOp.MIN, rows(0)), (ReduceOp.MAX, rows(SIZE - 1)),
                         (ReduceOp.PRODUCT, products), (ReduceOp.PREMUL_SUM(0.5), total / 2)):
        if op.type == torchcomms.RedOpType.PREMUL_SUM and MACHINES > 1:
            continue  # the engine between machines has none
        x = rows(RANK)
        done(comm.all_reduce, x, op)
        assert torch.allclose(x, expected), (op, x, expected)
    x = rows(RANK, 4).view(2, 2).t()  # not contiguous
    done(comm.all_reduce, x, ReduceOp.SUM)
    equal(x, sum(rows(rank, 4) for rank in range(SIZE)).view(2, 2).t())
    bits = torch.tensor([1 << RANK, 7])
    for op, expected in ((ReduceOp.BOR, [(1 << SIZE) - 1, 7]), (ReduceOp.BAND, [int(SIZE == 1), 7]), (ReduceOp.BXOR, [(1 << SIZE) - 1, 7 * (SIZE % 2)])):
        x = bits.clone()
        done(comm.all_reduce, x, op)
        equal(x, expected)
    for root in range(SIZE):
        x = rows(RANK)
        done(comm.reduce, x, root, ReduceOp.SUM)
        equal(x, total if RANK == root else rows(RANK))
    outs = torch.empty(3)
    everything = [rows(RANK) + 1000 * to for to in range(SIZE)]
    done(comm.reduce_scatter, outs, everything, ReduceOp.SUM)
    equal(outs, total + 1000 * RANK * SIZE)
    outs.zero_()
    done(comm.reduce_scatter_single, outs, torch.cat(everything), ReduceOp.SUM)
    equal(outs, total + 1000 * RANK * SIZE)
    mine = torch.empty(RANK + 1)
    uneven = [rows(RANK, to + 1) for to in range(SIZE)]
    done(comm.reduce_scatter_v, mine, uneven, ReduceOp.SUM)
    equal(mine, sum(rows(rank, RANK + 1) for rank in range(SIZE)))
    for to in range(SIZE):
        equal(uneven[to], rows(RANK, to + 1))  # unchanged


def movements(comm, done):
    everything = torch.cat([rows(rank) for rank in range(SIZE)])
    for root in range(SIZE):
        x = rows(RANK)
        done(comm.broadcast, x, root)
        equal(x, rows(root))
        x, parts = torch.empty(3), [rows(root) + to for to in range(SIZE)] if RANK == root else []
        done(comm.scatter, x, parts, root)
        equal(x, rows(root) + RANK)
        parts = [torch.empty(3) for _ in range(SIZE)] if RANK == root else []
        done(comm.gather, parts, rows(RANK), root)
        if RANK == root:
            equal(torch.cat(parts), everything)
        x = torch.zeros(3 * SIZE)
        done(comm.gather_single, x, rows(RANK), root)
        equal(x, everything if RANK == root else 0)
    parts = [torch.empty(3) for _ in range(SIZE)]
    done(comm.all_gather, parts, rows(RANK))
    equal(torch.cat(parts), everything)
    x = torch.empty(3 * SIZE)
    done(comm.all_gather_single, x, rows(RANK))
    equal(x, everything)
    parts = [torch.empty(rank + 1) for rank in range(SIZE)]
    parts[RANK] = rows(RANK, RANK + 1)
    done(comm.all_gather_v, parts, parts[RANK])  # in place
    for rank, part in enumerate(parts):
        equal(part, rows(rank, rank + 1))
    sent = [rows(RANK) + 10 * to for to in range(SIZE)]
    expected = [rows(rank) + 10 * RANK for rank in range(SIZE)]
    parts = [torch.empty(3) for _ in range(SIZE)]
    done(comm.all_to_all, parts, sent)
    equal(torch.cat(parts), torch.cat(expected))
    x = torch.empty(3 * SIZE)
    done(comm.all_to_all_single, x, torch.cat(sent))
    equal(x, torch.cat(expected))
    # Rank r sends r + 1 rows of two columns to rank 0, r + 2 to rank 1, ...
    out_splits, in_splits = [rank + RANK + 1 for rank in range(SIZE)], [RANK + to + 1 for to in range(SIZE)]
    x = torch.empty(sum(out_splits), 2)
    done(comm.all_to_all_v_single, x, torch.full((sum(in_splits), 2), float(RANK)), out_splits, in_splits)
    equal(x[:, 1], torch.cat([torch.full((split,), float(rank)) for rank, split in enumerate(out_splits)]))
    done(comm.barrier)


def messages(comm, done):
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    x, y = torch.empty(3), torch.empty(1)
    if RANK == 0:
        done(comm.send, rows(RANK), right)
    done(comm.recv, x, left)
    equal(x, rows(left))
    if RANK != 0:
        done(comm.send, rows(RANK), right)
    batch = comm.batch_op_create()
    batch.recv(x.zero_(), left)
    batch.recv(y, left)
    batch.send(rows(RANK), right)
    batch.send(torch.tensor([float(RANK)]), right)
    batch.issue(True).wait()
    equal(x, rows(left))
    equal(y, left)


def blocking(call, *arguments):
    work = call(*arguments, False)
    assert work.is_completed()
    work.wait()


def waited_for(call, *arguments):
    work = call(*arguments, True)
    work.wait()
    assert work.is_completed()
    work.wait_blocking()


def watched(call, *arguments):
    """A work completes though nobody waits."""
    if MACHINES > 1 and call.__name__ in ("send", "recv"):
        return waited_for(call, *arguments)  # Gloo's messages
    work, end = call(*arguments, True), time.monotonic() + SOON_S
    while not work.is_completed():
        assert time.monotonic() < end
        time.sleep(0.0005)


def operations(rounds=1):
    """Every operation in each form."""
    comm = communicator()
    assert (comm.get_rank(), comm.get_size(), comm.get_backend()) == (RANK, SIZE, "lockstep")
    for _ in range(int(rounds)):
        for done in (blocking, waited_for, watched):
            reductions(comm, done)
            movements(comm, done)
            if SIZE > 1:
                messages(comm, done)
    works = [comm.all_reduce(torch.ones(1000), ReduceOp.SUM, True) for _ in range(200)]  # finalize() waits for these
    comm.finalize()
    del works
    assert "finalized" in error_of(lambda: comm.barrier(False))


def split():
    """Groups of groups, names and stores that are used again, and lists that are wrong."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=RANK == 0, wait_for_workers=False)
    for _ in range(3):
        comm = communicator("same", store=store)
        for _ in range(3):
            ranks = [rank for rank in range(SIZE) if rank % 2 == RANK % 2][::-1]
            part = comm.split(ranks, "parity")
            assert part.get_rank() == ranks.index(RANK)
            x = torch.ones(2)
            part.all_reduce(x, ReduceOp.SUM, False)
            equal(x, len(ranks))
            alone = part.split([part.get_rank()], "alone")
            alone.barrier(False)
            rest = comm.split([] if RANK == 0 else list(range(1, SIZE)), "rest")
            assert (rest is None) == (RANK == 0)
            for done in (alone, part, rest):
                if done:
                    done.finalize()
        assert "its caller" in error_of(lambda: comm.split([(RANK + 1) % SIZE], "others"))
        told = error_of(lambda: comm.split([0, 1] if RANK == 0 else [1, 0], "unlike") if RANK < 2 else comm.split([SIZE], "unlike"))
        assert RANK > 1 or "[0, 1]" in told and "[1, 0]" in told, told
        comm.finalize()


def misuse():
    comm = communicator()
    assert "in the CPU's memory" in error_of(lambda: torchcomms.new_comm("lockstep", torch.device("meta"), "other"))
    for call in (lambda: comm.all_reduce(torch.ones(2, device="meta"), ReduceOp.SUM, False),
                 lambda: comm.send(torch.ones(2, device="meta"), (RANK + 1) % SIZE, True)):
        told = error_of(call)
        assert "meta" in told and "CPU" in told and "frame #" not in told, told
    assert "one input" in error_of(lambda: comm.all_to_all([torch.ones(1)], [torch.ones(1)] * SIZE, False))
    error_of(lambda: comm.all_to_all_v_single(torch.ones(1), torch.ones(1), [1], [1], True))
    assert not comm.is_aborted()
    comm.barrier(False)  # nothing of that ended the group
    started = time.monotonic()
    told = error_of(lambda: comm.all_reduce(torch.ones(2 + RANK), ReduceOp.SUM, False))
    assert "ranks disagree" in told and "frame #" not in told, told
    assert comm.is_aborted() and time.monotonic() - started < SOON_S
    error_of(lambda: comm.barrier(False))
    comm.finalize()


def killed(form):
    """The last rank is killed: all others have an exception, and is_aborted(), soon."""
    comm = communicator()
    hooked = threading.Event()
    comm.register_abort_hook(hooked.set)
    x = torch.ones(1000)
    for _ in range(5):
        comm.all_reduce(x, ReduceOp.AVG, False)
    if RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    if form == "watched":
        work = comm.all_reduce(x, ReduceOp.SUM, True)
        while not comm.is_aborted():
            assert time.monotonic() - started < SOON_S
            time.sleep(0.01)
        told = error_of(work.wait)
    else:
        told = error_of(lambda: comm.all_reduce(x, ReduceOp.SUM, form == "waited").wait())
    assert f"rank {SIZE - 1}" in told, told
    assert time.monotonic() - started < SOON_S and hooked.wait(SOON_S)
    assert not (form == "watched" and work.is_completed())
    comm.finalize()


def kills(times):
    """killed(), as often, in processes that are forked here: they need not load torch."""
    global RANK
    for i in range(int(times)):
        with socket.socket() as some:
            some.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(some.getsockname()[1])
        children = []
        for rank in range(SIZE):
            child = os.fork()
            if child == 0:
                RANK = rank
                os.environ["RANK"] = str(rank)
                end_at(LONG_S)
                try:
                    killed(("blocking", "waited", "watched")[i % 3])
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            children.append(child)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert ends == [0] * (SIZE - 1) + [-signal.SIGKILL], (i, ends)


def late():
    """A limit of one operation, of the communicator, and abort()."""
    comm = communicator(timeout=timedelta(seconds=60))
    started = time.monotonic()
    if RANK == 0:
        told = error_of(lambda: comm.recv(torch.ones(1), 1, False, timeout=timedelta(milliseconds=300)))
        assert time.monotonic() - started < SOON_S and "rank 1" in told, told
    else:
        error_of(lambda: comm.barrier(False))  # rank 0's limit ended the group
    comm.finalize()
    comm = communicator("aborted")
    threading.Timer(0.3, comm.abort).start()
    told = error_of(lambda: comm.recv(torch.ones(1), (RANK + 1) % SIZE, False))
    assert "abort" in told and comm.is_aborted(), told
    while "was aborted" not in error_of(lambda: comm.barrier(False)):  # it may have been another rank's abort()
        time.sleep(0.01)
    comm.finalize()
    comm = communicator("second", timeout=timedelta(milliseconds=500))
    if RANK == 0:
        told = error_of(lambda: comm.barrier(False))
        assert "timeout after 0.5 s" in told, told
    else:
        time.sleep(1.5)
        error_of(lambda: comm.barrier(False))
    comm.finalize()


def reconfigure():
    """Survivors of a killed rank go on in the same communicator."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=RANK == 0, wait_for_workers=False)
    comm = communicator(enable_reconfigure=True, store=store)
    assert "reconfigure() first" in error_of(lambda: comm.barrier(False))
    store.set(f"handle/{RANK}", comm.get_init_handle())
    handles = [store.get(f"handle/{rank}").decode() for rank in range(SIZE)]
    comm.reconfigure(uuid=1, init_handles=handles, timeout=timedelta(seconds=30)).wait()
    assert (comm.get_rank(), comm.get_size()) == (RANK, SIZE)
    comm.split([RANK], "alone").finalize()
    if RANK == SIZE - 1:
        comm.all_reduce(torch.ones(2), ReduceOp.SUM, False)
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.ones(2)
    comm.all_reduce(x, ReduceOp.SUM, False)
    equal(x, SIZE)
    assert f"rank {SIZE - 1}" in error_of(lambda: comm.all_reduce(x, ReduceOp.SUM, False))
    started = time.monotonic()
    comm.reconfigure(uuid=2, init_handles=set(handles[:-1]), timeout=timedelta(seconds=30)).wait()
    x = torch.ones(2)
    comm.all_reduce(x, ReduceOp.SUM, False)
    equal(x, SIZE - 1)
    print(f"RECONFIGURED IN {time.monotonic() - started:.3f} s")
    assert time.monotonic() - started < SOON_S and not comm.is_aborted()
    assert "used before" in error_of(lambda: comm.reconfigure(uuid=2, init_handles=handles[:-1]))
    part = comm.split([comm.get_rank()], "alone")
    part.barrier(False)
    comm.abort()
    comm.reconfigure(uuid=3, init_handles=handles[:-1], timeout=timedelta(seconds=30)).wait()
    comm.barrier(False)
    comm.finalize()


def train():
    """DistributedDataParallel over torchcomms, which waits for nothing but the futures of asynchronous works."""
    from torchcomms.device_mesh import init_device_mesh

    comm = communicator()
    mesh = init_device_mesh(mesh_dim_comms=(comm,), mesh_dim_names=("main",))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    plain = copy.deepcopy(model)
    parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("main"), bucket_cap_mb=0.01)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    batch = torch.randn(4 * SIZE, 64)
    for _ in range(20):
        for optimizer, each, part in zip(optimizers, (parallel, plain), (batch[RANK::SIZE], batch)):
            optimizer.zero_grad()
            each(part).square().mean().backward()
            optimizer.step()
    for mine, whole in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(mine, whole, atol=1e-5), (mine - whole).abs().max()
    comm.finalize()


def times(rounds="30"):
    """Microseconds of an all_reduce beside torchcomms' own Gloo, by turns in the same processes; medians of `rounds` rounds."""
    comms = {name: torchcomms.new_comm(name, CPU, name) for name in ("lockstep", "gloo")}
    for count, repeats in ((1, 200), (16 << 10, 100), (1 << 20, 10)):
        taken = {name: [] for name in comms}
        for _ in range(int(rounds)):
            for name, comm in comms.items():
                x = torch.full((count,), float(RANK + 1))
                comm.all_reduce(x, ReduceOp.SUM, False)
                equal(x, SIZE * (SIZE + 1) / 2)
                x.zero_()
                start = time.perf_counter()
                for _ in range(repeats):
                    comm.all_reduce(x, ReduceOp.SUM, False)
                taken[name].append((time.perf_counter() - start) / repeats * 1e6)
        if RANK == 0:
            print(4 * count, "bytes:", ", ".join(f"{name} {statistics.median(each):.1f} us ({min(each):.1f} to {max(each):.1f})" for name, each in taken.items()))
    for comm in comms.values():
        comm.finalize()


PROGRAMS = {program.__name__: program for program in (operations, split, misuse, killed, kills, late, reconfigure, train, times)}

if __name__ == "__main__":
    end_at(LONG_S if len(sys.argv) < 3 or sys.argv[1] == "killed" else 10 * LONG_S)
    torch.set_num_threads(1)
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
