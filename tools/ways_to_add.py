"""How long the sums of one step take by several ways, beside their wire: many small ones, as low rank has them.

laconic lab run --hosts 4 --link 1gbit -- \\
    sh -c 'RANK=$LACONIC_HOST WORLD_SIZE=$LACONIC_HOSTS exec python tools/ways_to_add.py'

Ways take turns in one run, so that whatever else the machine does befalls all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.transport import Group, ring_bytes

Way = Callable[[Sequence[Tensor]], None]


def main() -> None:
    """Time all ways in turn, and print a line for each."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--sums", type=int, default=26)
    args.add_argument("--entries", type=int, default=27_500, help="of float32, of each")
    args.add_argument("--turns", type=int, default=30)
    args.add_argument("--link-bits-per-s", type=float, default=1e9)
    given = args.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = [dist.new_group(), dist.new_group()]
    group = Group(groups[0], torch.device("cpu"))
    ways: dict[str, Way] = {
        "one after the other": _in_turn(groups),
        "two in flight": _in_flight(groups),
        "two at a time in one": _together(groups[0], 2),
        "four at a time in one": _together(groups[0], 4),
        "two hops": _in_hops(group),
    }
    ms: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(given.turns + 2):
        for name, way in ways.items():
            sums = [torch.full((given.entries,), float(dist.get_rank() + number)) for number in range(given.sums)]
            dist.barrier()
            start = time.perf_counter()
            way(sums)
            took = 1e3 * (time.perf_counter() - start)
            size = dist.get_world_size()
            for number, found in enumerate(sums):
                assert float(found[-1]) == size * number + size * (size - 1) / 2
            if turn >= 2:
                ms[name].append(took)
    if dist.get_rank() == 0:
        wire = given.sums * ring_bytes(4 * given.entries, dist.get_world_size()) * 8 / given.link_bits_per_s
        print(f"{given.sums} sums of {4 * given.entries / 1e3:.0f} kB: their wire takes {1e3 * wire:.1f} ms")
        first = statistics.median(ms["one after the other"])
        for name, times in ms.items():
            median = statistics.median(times)
            print(f"{name:22} median {median:7.1f} ms ({median / first:.2f}), least {min(times):7.1f} ms")
    dist.destroy_process_group()


def _in_turn(groups: Sequence[dist.ProcessGroup]) -> Way:
    def way(sums: Sequence[Tensor]) -> None:
        for one in sums:
            dist.all_reduce(one, group=groups[0])

    return way


def _in_flight(groups: Sequence[dist.ProcessGroup]) -> Way:
    """Each group has one under way; all ranks begin them in the same order."""

    def way(sums: Sequence[Tensor]) -> None:
        under_way: list[dist.Work] = []
        for number, one in enumerate(sums):
            if len(under_way) == len(groups):
                under_way.pop(0).wait()
            work = dist.all_reduce(one, group=groups[number % len(groups)], async_op=True)
            assert work is not None
            under_way.append(work)
        for work in under_way:
            work.wait()

    return way


def _together(group: dist.ProcessGroup, count: int) -> Way:
    def way(sums: Sequence[Tensor]) -> None:
        for first in range(0, len(sums), count):
            some = sums[first : first + count]
            whole = torch.cat(list(some))
            dist.all_reduce(whole, group=group)
            for one, part in zip(some, torch.split(whole, [one.numel() for one in some]), strict=True):
                one.copy_(part)

    return way


def _in_hops(group: Group) -> Way:
    def way(sums: Sequence[Tensor]) -> None:
        for one in sums:
            group.all_reduce_(one, "sum")

    return way


if __name__ == "__main__":
    main()
