"""How much of a link frames fill: Gloo's all-gather, its point-to-point messages, and connections of our own.

    laconic lab run --hosts 4 --link 1gbit -- python tools/link_use.py --mbit 1000 --bytes 190000 --frames 14

Every way moves the same frames in turns; host 0 prints one JSON object for each, with the share of the payload's rate
(0.95 of the link's, the rest is headers) that it used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.transport import Group, own_group, world


def _by_ring(frames: Sequence[Tensor]) -> None:
    for frame in frames:
        dist.all_gather([torch.empty_like(frame) for _ in range(dist.get_world_size())], frame)


def _by_messages(frames: Sequence[Tensor]) -> None:
    rank = dist.get_rank()
    others = [(rank + hop) % dist.get_world_size() for hop in range(1, dist.get_world_size())]
    for tag, frame in enumerate(frames):
        works = [dist.irecv(torch.empty_like(frame), src=peer, tag=tag) for peer in reversed(others)]
        works += [dist.isend(frame, dst=peer, tag=tag) for peer in others]
        for work in works:
            assert work is not None
            work.wait()


def main() -> None:
    """Measure every way in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, required=True, help="the link's rate")
    parser.add_argument("--bytes", type=int, default=190_000, help="of a frame")
    parser.add_argument("--frames", type=int, default=14, help="one after the other")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["LACONIC_HOST"]), world_size=int(os.environ["LACONIC_HOSTS"]))
    cpu = torch.device("cpu")
    group = Group(own_group(world(), cpu), cpu)
    frames = [torch.randint(0, 256, (args.bytes,), dtype=torch.uint8) for _ in range(args.frames)]
    ways: dict[str, Callable[[], object]] = {
        "Gloo's all-gather": lambda: _by_ring(frames),
        "Gloo's messages": lambda: _by_messages(frames),
        "connections of our own": lambda: [group.all_gather(frame, "frame") for frame in frames],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, move in ways.items():
            dist.barrier()
            start = time.perf_counter()
            move()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    num_bytes = args.bytes * args.frames * (dist.get_world_size() - 1)
    wire_s = 8 * num_bytes / (0.95e6 * args.mbit)
    if dist.get_rank() == 0:
        for name, taken in seconds.items():
            median = statistics.median(taken)
            row = {"way": name, "hosts": dist.get_world_size(), "bytes of a frame": args.bytes}
            print(json.dumps(row | {"ms": 1e3 * median, "link use": wire_s / median}))
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
