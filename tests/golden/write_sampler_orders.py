#!/usr/bin/env python3
"""Writes sampler_orders.txt: what PyTorch's DistributedSampler does, for tests/data/distributed_sampler_test.cpp.

    python3 tests/golden/write_sampler_orders.py     (needs torch; written with 2.13.0)

Four kinds of lines:

    draws SEED LIMIT NUMBER...               numbers below LIMIT, which is so large that many draws are rejected
    permutation SEED SIZE INDEX...           our shuffled order, from the independent implementation below
    checksum SEED SIZE SUM                   of a long one: sum of (place + 1) * index, modulo 2^64
    indices SIZE WORLD RANK DROP SHUFFLE SEED EPOCH INDEX...
                                             what DistributedSampler gives, our order in place of torch.randperm
"""

import pathlib

import torch
from torch.utils.data import distributed

MASK = 2**64 - 1


class Mt19937_64:
    """Matsumoto and Nishimura's generator with the parameters that the C++ standard gives for std::mt19937_64."""

    def __init__(self, seed):
        self.state = [seed & MASK]
        for i in range(1, 312):
            last = self.state[-1]
            self.state.append((6364136223846793005 * (last ^ (last >> 62)) + i) & MASK)
        self.place = 312

    def twist(self):
        s = self.state
        for i in range(312):
            word = (s[i] & 0xFFFFFFFF80000000) | (s[(i + 1) % 312] & 0x7FFFFFFF)
            s[i] = s[(i + 156) % 312] ^ (word >> 1) ^ (0xB5026F5AA96619E9 if word & 1 else 0)
        self.place = 0

    def next(self):
        if self.place == 312:
            self.twist()
        word = self.state[self.place]
        self.place += 1
        word ^= (word >> 29) & 0x5555555555555555
        word ^= (word << 17) & 0x71D67FFFEDA60000
        word ^= (word << 37) & 0xFFF7EEE000000000
        return word ^ (word >> 43)


def draw_below(limit, generator):
    """A number below limit: the high word of a 64-bit draw times limit; see src/data/permutation.cpp."""
    while True:
        high, low = divmod(generator.next() * limit, 2**64)
        if low >= 2**64 % limit:
            return high


def permutation(size, seed):
    generator = Mt19937_64(seed)
    order = list(range(size))
    for last in range(size - 1, 0, -1):
        other = draw_below(last + 1, generator)
        order[last], order[other] = order[other], order[last]
    return order


def sampler_lines(size, world, drop_last, shuffle, seed, epoch):
    for rank in range(world):
        sampler = distributed.DistributedSampler(
            range(size), num_replicas=world, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        sampler.set_epoch(epoch)
        indices = list(sampler)
        assert len(indices) == len(sampler)
        yield " ".join(map(str, ["indices", size, world, rank, int(drop_last), int(shuffle), seed, epoch, *indices]))


def main():
    # The standard demands this of a default-seeded std::mt19937_64.
    generator = Mt19937_64(5489)
    for _ in range(9999):
        generator.next()
    assert generator.next() == 9981545732273789042

    distributed.torch.randperm = lambda n, generator: torch.tensor(
        permutation(n, generator.initial_seed()), dtype=torch.int64)

    lines = []
    for seed, limit in ((1, 2**63 + 1), (2, 3 * 2**62), (3, MASK)):
        generator = Mt19937_64(seed)
        lines.append(" ".join(map(str, ["draws", seed, limit, *(draw_below(limit, generator) for _ in range(20))])))
    for seed in (0, 1, 42, 2**63, MASK):
        for size in (0, 1, 2, 3, 10, 33):
            lines.append(" ".join(map(str, ["permutation", seed, size, *permutation(size, seed)])))
    for seed, size in ((7, 10000), (42, 60000)):
        total = sum((place + 1) * index for place, index in enumerate(permutation(size, seed))) & MASK
        lines.append(f"checksum {seed} {size} {total}")
    for size in (0, 1, 2, 3, 5, 7, 10, 16, 23):
        for world in (1, 2, 3, 4, 8):
            for drop_last in (False, True):
                for shuffle, seed, epoch in ((False, 0, 0), (False, 5, 3), (True, 0, 0), (True, 42, 7)):
                    lines += sampler_lines(size, world, drop_last, shuffle, seed, epoch)
    text = "# Written by write_sampler_orders.py.\n" + "\n".join(lines) + "\n"
    pathlib.Path(__file__).with_name("sampler_orders.txt").write_text(text)


if __name__ == "__main__":
    main()
