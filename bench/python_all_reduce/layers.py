"""What a small all_reduce from Python costs in each layer, us a call, one call after the other.

PyTorch's own "fake" backend does nothing, so its time is that of torch.distributed: Python, the dispatcher, a Work.
A group of one rank adds our backend, one of all ranks their meeting as well.
"""

import statistics
import time

ROUNDS = 60  # short ones: what else the machine does hits some, not all


def groups_of(dist, rank, ranks):
    """name -> this rank's group. Every rank makes every group."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers "fake"

    def alone(backend):
        return [dist.new_group([one], backend=backend) for one in range(ranks)][rank]

    return {"fake, one rank": alone("fake"), "gloo, one rank": alone("gloo"), "lockstep, one rank": alone("lockstep"),
            "lockstep": dist.new_group(backend="lockstep"), "gloo": dist.group.WORLD}


def calls_of(dist, torch, group):
    """name -> a call, from the outermost layer inwards."""
    tensor, options = torch.zeros(1), dist.AllreduceOptions()
    options.asyncOp = False
    backend = group._get_backend(torch.device("cpu"))

    def wait(work):
        if work is not None:
            work.wait()

    return {"dist.all_reduce(tensor)": lambda: dist.all_reduce(tensor, group=group),
            "dist.all_reduce(tensor, async_op=True).wait()": lambda: dist.all_reduce(tensor, group=group, async_op=True).wait(),
            "group.allreduce([tensor], options)": lambda: wait(group.allreduce([tensor], options)),
            "backend.allreduce([tensor], options)": lambda: wait(backend.allreduce([tensor], options))}


def measure(dist, torch, rank, ranks, tiny):
    rows = []
    groups = groups_of(dist, rank, ranks)
    for name, group in groups.items():
        count = 10 if tiny else 20 if name == "gloo" else 300
        for call_name, call in calls_of(dist, torch, group).items():
            times = []
            for _ in range(2 if tiny else ROUNDS):
                dist.barrier(groups["lockstep"])
                started = time.perf_counter()
                for _ in range(count):
                    call()
                times.append((time.perf_counter() - started) / count * 1e6)
            rows.append({"group": name, "call": call_name, "median_us": statistics.median(times), "min_us": min(times)})
    return rows


def report(rows):
    groups = list(dict.fromkeys(row["group"] for row in rows))
    print(f"{'4 bytes, median (fastest round), us':<46}" + "".join(f"{group:>20}" for group in groups))
    for call in dict.fromkeys(row["call"] for row in rows):
        found = {row["group"]: row for row in rows if row["call"] == call}
        print(f"{call:<46}" + "".join(f"{found[group]['median_us']:>11.1f} ({found[group]['min_us']:>6.1f})" for group in groups))
