"""What ranks do in backend_test.py: each function is called as function(rank, size) in a group of all ranks."""

import atexit
import functools
import json
import os
import re
import threading
import time

import torch
import torch.distributed as dist

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16,
          torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128]
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]


def expect(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def values(rank, shape=(3, 5), dtype=torch.float32):
    count = torch.Size(shape).numel()
    numbers = ((torch.arange(count) * (rank + 2)) % 7).reshape(shape)
    if dtype == torch.bool:
        return numbers % 2 == 1
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers + rank).double() % 3).to(dtype)
    return numbers.to(dtype)


def all_values(size, *rest):
    return [values(rank, *rest) for rank in range(size)]


def every_collective(rank, size):
    everyone = all_values(size)
    tensor = values(rank)
    dist.all_reduce(tensor)
    expect(tensor, sum(everyone))
    columns = values(rank, (4, 6))
    dist.all_reduce(columns.t()[1:3])  # not contiguous
    expected = values(rank, (4, 6))
    expected.t()[1:3] = sum(all_values(size, (4, 6))).t()[1:3]
    expect(columns, expected)
    outputs = [torch.empty(3, 5) for _ in range(size)]
    dist.all_gather(outputs, values(rank))
    expect(torch.stack(outputs), torch.stack(everyone))
    flat = torch.empty(size * 3, 5)
    dist.all_gather_into_tensor(flat, values(rank))
    expect(flat, torch.cat(everyone))
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, values(rank, (2 * size,)))
    expect(part, sum(all_values(size, (2 * size,)))[2 * rank:2 * rank + 2])
    dist.reduce_scatter(part, list(values(rank, (size, 2))))
    expect(part, sum(all_values(size, (size, 2)))[rank])
    for elements in (2, 3000):  # the more, the higher the rank
        blocks = [values(rank, (elements + r,)) for r in range(size)]
        own = torch.empty(elements + rank)
        dist.reduce_scatter(own, blocks)
        expect(own, sum(all_values(size, (elements + rank,))))
        work = dist.reduce_scatter(own, blocks, dist.ReduceOp.MAX, async_op=True)
        work.wait()
        expect(own, torch.stack(all_values(size, (elements + rank,))).amax(0))
        expect(blocks[rank], values(rank, (elements + rank,)))
    for root in range(size):
        tensor = values(rank)
        dist.broadcast(tensor, root)
        expect(tensor, values(root))
        tensor = values(rank)
        dist.reduce(tensor, root)
        expect(tensor, sum(everyone) if rank == root else values(rank))
        outputs = [torch.empty(3, 5) for _ in range(size)] if rank == root else None
        dist.gather(values(rank), outputs, root)
        if rank == root:
            expect(torch.stack(outputs), torch.stack(everyone))
        if RELEASE >= (2, 14):
            flat = torch.empty(size, 3, 5) if rank == root else None
            dist.gather_single(values(rank), flat, root)
            if rank == root:
                expect(flat, torch.stack(everyone))
        tensor = torch.empty(3, 5)
        dist.scatter(tensor, everyone if rank == root else None, root)
        expect(tensor, values(rank))
    exchange(rank, size)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)], objects


def exchange(rank, size):
    """All forms of all-to-all."""
    rows = torch.empty(size, 2)
    dist.all_to_all_single(rows, values(rank, (size, 2)))
    expect(rows, torch.stack([values(r, (size, 2))[rank] for r in range(size)]))
    # Rank s sends s + 2 d rows to rank d; rank 0 sends itself none.
    sends, receives = [rank + 2 * r for r in range(size)], [r + 2 * rank for r in range(size)]
    out = torch.empty(sum(receives), 3)
    dist.all_to_all_single(out, torch.full((sum(sends), 3), float(rank)), receives, sends)
    expect(out, torch.cat([torch.full((r + 2 * rank, 3), float(r)) for r in range(size)]))
    lists = [torch.empty(n) for n in receives]
    dist.all_to_all(lists, [torch.full((n,), float(rank)) for n in sends])
    expect(torch.cat(lists), out[:, 0].clone())


def reduction(name, everyone):
    """The definition, from all ranks' tensors, in their dtype; None where it is not defined and must be refused."""
    dtype = everyone.dtype
    bits = not dtype.is_floating_point and not dtype.is_complex
    if name in ("BAND", "BOR", "BXOR"):
        combine = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[name]
        return functools.reduce(combine, everyone) if bits else None
    if dtype.is_complex and name in ("MIN", "MAX") or dtype == torch.bool and name == "AVG" or bits and name == "PREMUL_SUM":
        return None
    if dtype == torch.bool:
        return everyone.any(0) if name in ("SUM", "MAX") else everyone.all(0)
    if name in ("MIN", "MAX"):
        return everyone.amin(0) if name == "MIN" else everyone.amax(0)
    wide = everyone.to(torch.complex128 if dtype.is_complex else torch.int64 if bits else torch.float64)
    if name == "PRODUCT":
        return functools.reduce(torch.mul, wide).to(dtype)
    if name == "PREMUL_SUM":
        return sum(factor_of(rank) * wide[rank] for rank in range(len(everyone))).to(dtype)
    total = wide.sum(0)
    if name == "AVG":
        if bits:
            return torch.div(total, len(everyone), rounding_mode="trunc").to(dtype)
        # Divided in the precision in which the backend adds, and part by part.
        added_in = {torch.float64: torch.float64, torch.complex128: torch.complex128, torch.complex64: torch.complex64}
        total = total.to(added_in.get(dtype, torch.float32))
        total = (torch.view_as_real(total) if dtype.is_complex else total) / len(everyone)
        return (torch.view_as_complex(total) if dtype.is_complex else total).to(dtype)
    return total.to(dtype)


def factor_of(rank):
    return rank + 0.5


def every_dtype_and_reduction(rank, size):
    tried = refused = 0
    for dtype in DTYPES:
        for name in OPS:
            op = dist._make_nccl_premul_sum(factor_of(rank)) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
            expected = reduction(name, torch.stack(all_values(size, (size, 300), dtype)))
            tried, refused = tried + 1, refused + (expected is None)
            for elements in (1, 300):  # with the announcement, and beyond
                reduce_in_all_forms(rank, size, dtype, op, elements, expected)
    assert (tried, refused) == (len(DTYPES) * len(OPS), 4 * 3 + 6 * 1 + 1 + 2 * 5), (tried, refused)
    large = torch.tensor([2**62 + rank, -2**63, 2**63 - 1])
    dist.all_reduce(large, dist.ReduceOp.AVG)  # of which the sum is no int64
    assert large.tolist() == [2**62 + (size - 1) // 2, -2**63, 2**63 - 1], large
    sparse = torch.sparse_coo_tensor([[rank, 0]], [1.0, 2.0], (size,))
    dist.all_reduce(sparse)
    expect(sparse.to_dense(), torch.ones(size).index_add_(0, torch.tensor([0]), torch.tensor([2.0 * size])))


def reduce_in_all_forms(rank, size, dtype, op, elements, expected):
    """`expected`: [size, 300] of what all ranks' values(rank, (size, 300), dtype) give, or None: must be refused."""
    mine = values(rank, (size, 300), dtype)[:, :elements].contiguous()
    tensor, part, flat_part = mine.clone(), torch.empty(elements, dtype=dtype), torch.empty(elements, dtype=dtype)
    root = elements % size
    forms = [lambda: dist.reduce(tensor, root, op), lambda: dist.reduce_scatter(part, list(mine), op),
             lambda: dist.reduce_scatter_tensor(flat_part, mine.flatten(), op)]
    everywhere = mine.clone()
    if not dtype.is_complex or expected is not None and op == dist.ReduceOp.SUM:  # torch itself refuses the rest
        forms.append(lambda: dist.all_reduce(everywhere, op))
    for form in forms:
        if expected is None:
            expect_error(form, "is not defined for")
        else:
            form()
    if expected is None:
        return
    expected = expected[:, :elements]
    expect(tensor, expected if rank == root else mine)
    expect(part, expected[rank])
    expect(flat_part, expected[rank])
    if len(forms) == 4:
        expect(everywhere, expected)


def messages(rank, size):
    big = 300_000  # more than a channel holds
    following, before = (rank + 1) % size, (rank - 1) % size
    works = [dist.isend(torch.full((big,), float(rank)), following, tag=1),
             dist.isend(torch.tensor([rank]), following, tag=2)]
    small, large = torch.empty(1, dtype=torch.long), torch.empty(big)
    dist.recv(small, before, tag=2)  # by tag, not by order
    dist.recv(large, before, tag=1)
    for work in works:
        work.wait()
    assert small.item() == before and large.eq(before).all()
    if rank == 0:
        sources = {dist.recv(small) for _ in range(size - 1)}
        assert sources == set(range(1, size)), sources
    else:
        dist.send(torch.tensor([rank]), 0)
    dist.barrier()  # a receive from anybody takes whatever comes
    received = torch.empty(4)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((4,), float(rank)), following),
                                        dist.P2POp(dist.irecv, received, before)]):
        work.wait()
    expect(received, torch.full((4,), float(before)))


def futures(rank, size):
    tensors = [torch.full((1000 * i + 1,), float(rank)) for i in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    doubled = [work.get_future().then(lambda future: future.value()[0] * 2) for work in works]
    total = float(sum(range(size)))
    for tensor, future in reversed(list(zip(tensors, doubled))):
        expect(future.wait(), torch.full_like(tensor, 2 * total))
    # A callback that waits for a future of its own, as PowerSGD's does.
    inner = torch.full((200_000,), 1.0)
    outer = dist.all_reduce(torch.full((200_000,), 1.0), async_op=True).get_future()
    chained = outer.then(lambda _: dist.all_reduce(inner, async_op=True).get_future().wait()[0])
    expect(chained.wait(), torch.full_like(inner, float(size)))
    # A future for a message that comes only after later ones are complete.
    late = torch.empty(1)
    if rank == 0:
        waiting = dist.irecv(late, 1)
        future = waiting.get_future()
    dist.all_reduce(torch.ones(100_000), async_op=True).get_future().wait()
    if rank == 1:
        dist.send(torch.tensor([7.0]), 0)
    if rank == 0:
        future.wait()
        assert waiting.is_completed() and late.item() == 7
    works = [dist.barrier(async_op=True) for _ in range(3)]
    while not all(work.is_completed() for work in works):
        time.sleep(0.001)


def coalesced(rank, size):
    tensors = [torch.full((n,), float(rank + 1)) for n in (1, 1000, 100_000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        expect(tensor, torch.full_like(tensor, size * (size + 1) / 2))
    dist.all_reduce_coalesced(tensors)
    expect(tensors[1], torch.full_like(tensors[1], size * size * (size + 1) / 2))
    gather_coalesced(rank, size)


def gather_coalesced(rank, size):
    """Lists of tensors of different sizes, one not contiguous, one empty, by the group's methods and by the manager."""
    shapes = [(3, 5), (0,), (50_000,), (6, 4)]
    group = dist.distributed_c10d._get_default_group()

    def inputs_of(rank, rows=1):
        tensors = [values(rank, (rows * shape[0], *shape[1:])) + i for i, shape in enumerate(shapes)]
        return tensors[:-1] + [tensors[-1].t().contiguous().t()]

    inputs = inputs_of(rank)
    outputs = [[torch.full(shape, -1.0) for shape in shapes] for _ in range(size)]
    group.allgather_coalesced(outputs, inputs, dist.distributed_c10d.AllgatherOptions()).wait()
    for r in range(size):
        for output, expected in zip(outputs[r], inputs_of(r)):
            expect(output, expected)
    outputs = [[torch.full(shape, -1.0) for shape in shapes] for _ in range(size)]
    dist.all_gather_coalesced(outputs, inputs)
    expect(outputs[size - 1][2], inputs_of(size - 1)[2])

    gathered = [torch.cat(same) for same in zip(*(inputs_of(r) for r in range(size)))]
    reduced = [sum(same).chunk(size)[rank] if same[0].numel() else same[0]
               for same in zip(*(inputs_of(r, rows=size) for r in range(size)))]
    ways = [(group.allgather_into_tensor_coalesced, dist.all_gather_into_tensor, inputs, gathered),
            (group.reduce_scatter_tensor_coalesced, dist.reduce_scatter_tensor, inputs_of(rank, rows=size), reduced)]
    for method, function, inputs, expected in ways:
        for managed in (False, True):
            outputs = [torch.full_like(tensor, -1) for tensor in expected]
            if managed:
                with dist._coalescing_manager(async_ops=True) as manager:
                    for output, tensor in zip(outputs, inputs):
                        function(output, tensor)
                manager.wait()
            else:
                method(outputs, inputs).wait()
            for output, result in zip(outputs, expected):
                expect(output, result)
        try:
            method(outputs[:1], inputs)
        except ValueError as error:
            assert "1 outputs for 4 inputs" in str(error), error
        else:
            raise AssertionError("one output for four inputs")


def subgroups(rank, size):
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([2, 0])]
    mine = [group for group in pairs if dist.get_rank(group) >= 0]
    # Two groups for each rank, entered in an order that makes a cycle.
    tensors = [torch.full((200_000,), float(rank)) for _ in mine]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, mine)]
    for work in works if rank != 1 else reversed(works):
        work.wait()
    members = {0: (0, 1), 1: (1, 2), 2: (2, 0)}
    totals = [float(sum(members[pairs.index(group)])) for group in mine]
    for tensor, total in zip(tensors, totals):
        expect(tensor, torch.full_like(tensor, total))


def split(rank, size):
    """What torch.distributed.split_group and device meshes build on; before torch 2.15 split_group itself needs an accelerator."""
    from datetime import timedelta

    world = dist.distributed_c10d._get_default_group()
    backend = world._get_backend(torch.device("cpu"))
    assert backend.supports_splitting
    part = world.split_group([2, 0], timeout=timedelta(seconds=20), group_name="part", group_desc="two of three")
    assert (part is None) == (rank == 1), part
    if part is not None:
        place = [2, 0].index(rank) if RELEASE >= (2, 14) else rank // 2  # before, torch sorted the ranks
        assert (part.rank(), part.size(), part.group_name, part.group_desc) == (place, 2, "part", "two of three")
        tensor = torch.tensor([float(rank)])
        part.allreduce([tensor]).wait()
        assert tensor.item() == 2
    if RELEASE >= (2, 15):
        part = dist.split_group(split_ranks=[[0, 2], [1]])
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=part)
        assert tensor.item() == (1 if rank == 1 else 2), tensor
    named = dist.new_group([0, 1], group_desc="a pair")
    if rank < 2:
        assert named.group_desc == "a pair"
        dist.barrier(named)
    merged = world.merge_remote_group(dist.PrefixStore("merge", dist.distributed_c10d._get_default_store()), size,
                                      timeout=timedelta(seconds=20), group_name="all again")
    tensor = torch.ones(1)
    merged.allreduce([tensor]).wait()
    assert tensor.item() == size


def shutdown(rank, size):
    """Destroying a group leaves it at once, whatever still refers to it."""
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))
    kept = backend.allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu")).fill_(3)
    dist.all_reduce(kept, group=group)
    if rank == 0:
        pending = dist.all_reduce(torch.ones(300_000), group=group, async_op=True)
        dist.destroy_process_group(group)
        expect_error(pending.wait, "this rank left the group")
        expect_error(lambda: backend.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait(), "has left the group")
        backend.shutdown()  # a second call does no harm
    else:
        dist.barrier()
        expect_error(lambda: dist.all_reduce(torch.ones(300_000), group=group), "rank 0 ")
    if rank == 0:
        dist.barrier()
    expect(kept, torch.full_like(kept, 3.0 * size))


def abort(rank, size):
    group = dist.new_group()
    if rank == 0:
        dist.barrier()
        dist.distributed_c10d._abort_process_group(group)
    else:
        work = dist.all_reduce(torch.ones(300_000), group=group, async_op=True)
        dist.barrier()
        expect_error(work.wait, "abort")


def expect_error(function, text):
    try:
        function()
    except RuntimeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error, expected one with: {text}")


def threads(rank, size):
    groups = [dist.new_group() for _ in range(3)]
    wrong = []

    def work(group, count):
        for i in range(count):
            tensor = torch.full((5000,), float(rank + i))
            dist.all_reduce(tensor, group=group)
            if not tensor.eq(2 * i + 1).all():
                wrong.append((i, tensor[0].item()))

    all_threads = [threading.Thread(target=work, args=(group, 100)) for group in groups]
    for thread in all_threads:
        thread.start()
    for thread in all_threads:
        thread.join()
    assert not wrong, wrong[:3]


class LeavesSlowly:
    def __call__(self, future):
        return future.value()

    def __del__(self):
        time.sleep(0.5)


at_end = []  # called when the backend has ended its threads: this is registered before any group is made


@atexit.register
def call_at_end():
    for function in at_end:
        try:
            function()
        except BaseException as error:  # a shutting-down interpreter would only print it
            print("at the end:", error, flush=True)
            os._exit(1)


def futures_at_the_end(rank, size, destroys):
    """The process ends while a callback is being freed and memory keeps the group alive; one future stays incomplete."""
    if not destroys:
        dist.destroy_process_group = lambda: None
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    kept = [backend.allocate_tensor(1, dtype=torch.float32, device=torch.device("cpu"))]
    if rank == 0:
        kept.append(dist.irecv(torch.empty(3), 1).get_future())
    else:
        time.sleep(0.2)
    summed = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(LeavesSlowly()).wait()
    assert summed[0].tolist() == [size] * 3

    def check():
        if rank == 1:
            time.sleep(2)  # mostly the other rank knows only of its own end
        for future in kept[1:]:
            try:
                future.wait()
                raise AssertionError("a future without an operation is complete")
            except RuntimeError as error:
                known = "the process is ending|rank 1 .*(ended while|left the group)"
                left = "(this rank|rank 1 has already) left the group"  # whichever of the two destroys it first
                assert re.search(left if destroys else known, str(error)), error

    at_end.append(check)


def disagree(rank, size):
    try:
        dist.all_reduce(torch.ones(4 + rank))
    except RuntimeError as error:
        text = str(error)
        assert "all_reduce(float32, 4 elements, sum)" in text and "all_reduce(float32, 5 elements, sum)" in text, text
    else:
        raise AssertionError("ranks disagreed, and nobody said so")
    # The group is over; the barrier at the end of a program needs another.
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file:///tmp/lockstep_disagree_{os.getppid()}", rank=rank,
                            world_size=size)


class StoreOfSeveralHosts(dist.Store):
    """A store through which every other rank says, when a group is formed, that it runs on another host."""

    def __init__(self, path, rank, size):
        super().__init__()
        self.store, self.rank = dist.FileStore(path, size), rank

    def set(self, key, value):
        text = value if isinstance(value, str) else bytes(value).decode()
        if '"boot_id"' in text:
            card = json.loads(text[1:])  # after a mark
            card.update(boot_id=f"boot {self.rank % 2}", host=f"host-{self.rank % 2}")
            text = text[0] + json.dumps(card)
        self.store.set(key, text)

    def get(self, key):
        return self.store.get(key)

    def add(self, key, value):
        return self.store.add(key, value)

    def wait(self, keys, timeout=None):
        return self.store.wait(keys, timeout) if timeout else self.store.wait(keys)

    def check(self, keys):
        return self.store.check(keys)


def join_from_several_hosts(rank, size, path):
    try:
        dist.init_process_group("lockstep", store=StoreOfSeveralHosts(path, rank, size), rank=rank, world_size=size)
    except RuntimeError as error:
        with open(f"{path}.{rank}", "w") as file:
            file.write(str(error))


def disagree_on_a_message(rank, size):
    group = dist.new_group(backend="lockstep")
    texts = ["rank 1 received a message from rank 0", "4 elements of float32 sent, 4 of int32 expected (tag 3)"]
    work = dist.isend(torch.ones(4), 1, group, tag=3) if rank == 0 else \
        dist.irecv(torch.zeros(4, dtype=torch.int32), 0, group, tag=3)
    for text in texts:  # such a small message is sent before anybody checks it: then the next operation fails
        expect_error(lambda: (work.wait(), dist.barrier(group)), text)


def be_killed(rank, size, path):
    torch.set_num_threads(1)
    dist.init_process_group("lockstep", init_method="file://" + path, rank=rank, world_size=size)
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
        for other in (0, 2):
            while not os.path.exists(f"{path}.ready{other}"):
                time.sleep(0.01)
        with open(f"{path}.dying", "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), 9)
    open(f"{path}.ready{rank}", "w").close()
    try:
        dist.all_reduce(torch.ones(1_000_000))
    except RuntimeError as error:
        with open(f"{path}.dying") as file:
            seconds = time.time() - float(file.read())
        with open(f"{path}.{rank}", "w") as file:
            file.write(f"{seconds} {error}")


def miss_a_barrier(rank, size):
    from datetime import timedelta

    group = dist.new_group(backend="lockstep", timeout=timedelta(seconds=2))
    if rank == 0:
        backend = group._get_backend(torch.device("cpu"))
        try:
            backend.monitored_barrier(timedelta(milliseconds=300), True)
        except RuntimeError as error:
            assert "Rank 0 timed out in monitoredBarrier" in str(error) and "ranks 1, 2" in str(error), error
        else:
            raise AssertionError("nobody else came")
    # A timeout of 0 was taken for the group's timeout, so the error was another rank's end, if it ended at all.
    group = dist.new_group(backend="lockstep", timeout=timedelta(seconds=60))
    if rank == 0:
        started = time.monotonic()
        try:
            group._get_backend(torch.device("cpu")).monitored_barrier(timedelta(0), True)
        except RuntimeError as error:
            assert "Rank 0 timed out in monitoredBarrier" in str(error) and "ranks 1, 2" in str(error), error
            assert time.monotonic() - started < 5
        else:
            raise AssertionError("nobody else came")


if __name__ == "__main__":  # under torchrun
    dist.init_process_group("lockstep")
    tensor = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    print(f"{dist.get_rank()}:{tensor.item()}\n", end="", flush=True)
    dist.destroy_process_group()
