"""Push and pull by collectives alone: over NCCL, and over Gloo where workers cannot call each other."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import FrameError
from laconic.transport.transport import Push


def push_pull_in_rounds(push: Push, group: dist.ProcessGroup, wire: torch.device) -> tuple[list[Tensor], list[int]]:
    """Every owner's answer, and how many bytes of parts each worker sent here, by rank.

    A collective receives a message into room of its own length: of four rounds, two tell lengths.
    """
    assert push.answer is not None
    sent = [part.numel() for part in push.parts]
    heard = _lengths(sent, [push.longest[group.rank()]] * len(sent), group, wire)
    own = push.answer(enumerate(_swapped(torch.cat(list(push.parts)), sent, heard, group)))
    repeated = [own.numel()] * len(sent)
    lengths = _lengths(repeated, push.longest, group, wire)
    return _swapped(own.repeat(len(sent)), repeated, lengths, group), heard


def _lengths(mine: Sequence[int], longest: Sequence[int], group: dist.ProcessGroup, wire: torch.device) -> list[int]:
    """What each worker will send here, told in one hop; mine[r] goes to worker r, who says at most longest[r]."""
    heard = torch.empty(len(mine), dtype=torch.int64, device=wire)
    dist.all_to_all_single(heard, torch.tensor(mine, device=wire), group=group)
    lengths: list[int] = heard.tolist()
    for rank, (length, most) in enumerate(zip(lengths, longest, strict=True)):
        if not 0 <= length <= most:
            raise FrameError(f"rank {rank} is to say {length} bytes of {most}; nothing is applied")
    return lengths


def _swapped(outgoing: Tensor, sent: Sequence[int], heard: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """sent[r] bytes go to worker r and heard[r] come from it."""
    incoming = outgoing.new_empty(sum(heard))
    dist.all_to_all_single(incoming, outgoing, list(heard), list(sent), group=group)
    # A message may begin anywhere, its words may not.
    return [part.clone() for part in torch.split(incoming, list(heard))]
