"""What ranks train in backend_test.py: each function is called as function(rank, size) in a group of all ranks."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from programs import expect


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 100), torch.nn.ReLU(),
                               torch.nn.Linear(100, 5))


def train(network, optimizer, rank, steps=5):
    for step in range(steps):
        torch.manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(torch.randn(8, 20)), torch.randint(5, (8,))).backward()
        optimizer.step()


def train_ddp(rank, size):
    network = DistributedDataParallel(model(), bucket_cap_mb=0.05)
    train(network, torch.optim.SGD(network.parameters(), 0.1, momentum=0.9), rank)
    return {name: weight.clone() for name, weight in network.module.state_dict().items()}


def communication_hooks(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    reference = DistributedDataParallel(model())
    train(reference, torch.optim.SGD(reference.parameters(), 0.1), rank)
    hooks = [(None, default_hooks.allreduce_hook), (None, default_hooks.fp16_compress_hook),
             (powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)]
    for state, hook in hooks:
        # PowerSGD starts collectives when a future completes: with several buckets their order is random, as with Gloo.
        network = DistributedDataParallel(model(), bucket_cap_mb=25 if state else 0.05)
        network.register_comm_hook(state, hook)
        train(network, torch.optim.SGD(network.parameters(), 0.1), rank)
        for weight, expected in zip(network.parameters(), reference.parameters()):
            torch.testing.assert_close(weight, expected, rtol=0.1, atol=0.1)
        everyone = [torch.empty_like(weight) for _ in range(size)]
        dist.all_gather(everyone, weight.detach())
        expect(everyone[0], everyone[1])


def segment_of(tensor):
    """The mapping of this process in which the tensor's memory lies: its inode and name, of /proc/self/maps."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes - 1
    with open("/proc/self/maps") as file:
        for line in file:
            span, _, _, _, inode, *name = line.split(maxsplit=5)
            begin, end = (int(address, 16) for address in span.split("-"))
            if begin <= first and last < end:
                return inode, "".join(name).strip()
    raise AssertionError("memory that is mapped nowhere")


def buckets_in_shared_memory(rank, size):
    """PyTorch's reducer takes its buckets from the backend, which then reduces them in place."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    own = segment_of(backend.allocate_tensor(1, dtype=torch.float32, device=torch.device("cpu")))
    assert "memfd:lockstep" in own[1] and segment_of(torch.ones(1_000_000)) != own, own
    for disabled in (False, True):
        os.environ["DDP_DISABLE_COMM_MEM"] = str(int(disabled))
        seen, moved = [], []

        def hook(_, bucket):
            buffer = bucket.buffer()
            seen.append(segment_of(buffer))
            address = buffer.data_ptr()

            def end(future):
                moved.append(future.value()[0].data_ptr() != address)
                return future.value()[0].div_(size)

            return dist.all_reduce(buffer, async_op=True).get_future().then(end)

        network = DistributedDataParallel(model(), bucket_cap_mb=0.05, gradient_as_bucket_view=True)
        network.register_comm_hook(None, hook)
        train(network, torch.optim.SGD(network.parameters(), 0.1), rank, steps=3)
        assert len(seen) >= 5 and len(moved) == len(seen) and not any(moved), (seen, moved)
        assert all((where == own) != disabled for where in seen), (disabled, own, seen)
        for parameter in network.parameters():  # views into the same buckets
            assert (segment_of(parameter.grad) == own) != disabled


def train_fsdp2(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    network = model()
    for layer in network:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    train(network, torch.optim.AdamW(network.parameters(), 1e-2), rank)
    return {name: weight.full_tensor().detach().clone() for name, weight in network.named_parameters()}


def fork(rank, size):
    """A child has none of the shared memory, is refused, and does no harm when it ends."""
    import gc

    network = DistributedDataParallel(model())
    train(network, torch.optim.SGD(network.parameters(), 0.1), rank, steps=1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            dist.all_reduce(torch.ones(3))
        except RuntimeError as error:
            code = 0 if "forked" in str(error) else 2
        del network
        gc.collect()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    train(network, torch.optim.SGD(network.parameters(), 0.1), rank, steps=1)
