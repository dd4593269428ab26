"""Messages of any length by collectives alone: over NCCL, and over Gloo where workers cannot call each other."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import FrameError


def deal_in_rounds(
    messages: Sequence[Tensor], longest: Sequence[int], group: dist.ProcessGroup, wire: torch.device
) -> list[Tensor]:
    """Message r goes to worker r; those for this one, by rank, of at most longest[r] bytes.

    A collective receives into room of its own length: of two rounds, the first tells lengths.
    """
    sent = [message.numel() for message in messages]
    heard = _lengths(sent, longest, group, wire)
    outgoing = torch.cat(list(messages))
    incoming = outgoing.new_empty(sum(heard))
    dist.all_to_all_single(incoming, outgoing, heard, sent, group=group)
    # A message may begin anywhere, its words may not.
    return [message.clone() for message in torch.split(incoming, heard)]


def _lengths(mine: Sequence[int], longest: Sequence[int], group: dist.ProcessGroup, wire: torch.device) -> list[int]:
    """What each worker will send here, told in one hop; mine[r] goes to worker r, who says at most longest[r]."""
    heard = torch.empty(len(mine), dtype=torch.int64, device=wire)
    dist.all_to_all_single(heard, torch.tensor(mine, device=wire), group=group)
    lengths: list[int] = heard.tolist()
    for rank, (length, most) in enumerate(zip(lengths, longest, strict=True)):
        if not 0 <= length <= most:
            raise FrameError(f"rank {rank} is to say {length} bytes of {most}; nothing is applied")
    return lengths
