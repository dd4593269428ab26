"""The running half of *when*: how far each group has moved since its last exchange, looked at as rarely as will do."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.kernels import hash_64
from laconic.replicas.gossip.vector import ModelVector
from laconic.trigger import EveryStep, Speech

_FIRST_BAR = 4.0  # a moving bar begins at this multiple of the first step's mean change


@dataclass
class _Look:
    """A measurement under way: on CUDA its figures arrive in pinned memory while training goes on."""

    groups: list[int]
    gaps: list[int]  # at the time of the measurement
    lr_ratio: float
    figures: Tensor  # (2, len(groups)) on the host: change, size
    arrived: torch.cuda.Event | None


class ChangeTracker:
    """Says at each step which groups have something to say.

    A group is looked at only when it may have reached the bar: what is d away after g steps is foretold to be at most
    d*t/g away after t, and half of the way to where that line meets the bar is slept through. Of a large group a sample
    is looked at. On CUDA the figures arrive a step or so later, and nothing waits for them.
    """

    def __init__(self, trigger: EveryStep | Speech, vector: ModelVector, seed: int, rank: int) -> None:
        self._trigger = trigger
        self._measure = trigger.measure
        self.looks = self._measure is not None  # so an exchange settles what a group has to say, whoever began it
        self._vector = vector
        self._phase = hash_64(seed, rank) / 2.0**64
        num_groups = len(vector.groups)
        self._everything = range(num_groups)
        self._gaps = [0] * num_groups
        self._asleep_until = [0] * num_groups  # the gap at which a group is looked at next
        self._bar: float | None = None if self._measure is None else self._measure.bar
        self._peak_lr = 0.0
        self.lr_share = 1.0  # the learning rate over the largest so far
        self._share_sent = 0.0  # models sent since the last step
        self._look: _Look | None = None
        # What each group was after its last exchange, or a sample of it.
        self._last = [vector.sample(k) for k in self._everything] if self._measure else []
        self.passes = 0.0  # over the model, in all

    def wants(self, step: int, lr: float, *, patiently: bool, held_up: bool = False) -> list[int]:
        """The groups that speak at this step; `patiently` waits for a measurement, so that reruns are equal.

        While what was said before is `held_up`, a moving bar does not fall: it would not be heard for long afterwards.
        """
        self._note_step(lr)
        if self._measure is not None and self._bar is not None:
            moved = self._measure.moved(self._bar, self._share_sent)
            self._bar = max(self._bar, moved) if held_up else moved
        self._share_sent = 0.0
        speaks = [self._trigger.speaks(step, gap, self._phase) for gap in self._gaps]
        due = [k for k in self._everything if speaks[k] is None and self._gaps[k] >= self._asleep_until[k]]
        if due and self._look is None:
            self._look = self._begin(due)
        loud = self._loud(patiently)
        return [k for k in self._everything if speaks[k] or (k in loud and speaks[k] is None)]

    def turns(self, step: int, lr: float) -> range:
        """The turns, by number, that come with this step by the clock that all workers share."""
        self._note_step(lr)
        return self._trigger.turns(step)

    def _note_step(self, lr: float) -> None:
        self._peak_lr = max(self._peak_lr, lr)
        self.lr_share = lr / self._peak_lr if self._peak_lr else 1.0
        self._gaps = [gap + 1 for gap in self._gaps]

    def _begin(self, groups: list[int]) -> _Look:
        """Start measuring; nothing here waits for the device."""
        lasts = [self._last[k] for k in groups]
        moved = [self._vector.sample(k) - last for k, last in zip(groups, lasts, strict=True)]
        self.passes += sum(last.numel() for last in lasts) / self._vector.num_entries
        figures = torch.stack([_squares(moved), _squares(lasts)])
        arrived = None
        if figures.device.type == "cuda":
            host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            host.copy_(figures, non_blocking=True)
            arrived = torch.cuda.current_stream(figures.device).record_event()
            figures = host
        return _Look(groups, [self._gaps[k] for k in groups], self.lr_share, figures, arrived)

    def _loud(self, patiently: bool) -> set[int]:
        """The groups whose measurement, if it has arrived, is above the bar; the others sleep on."""
        look = self._look
        if look is None or self._measure is None:
            return set()
        if look.arrived is not None and not look.arrived.query():  # type: ignore[no-untyped-call]
            if not patiently:
                return set()
            look.arrived.synchronize()
        self._look = None
        counts = [max(1, self._vector.groups[k].num_trained) for k in look.groups]
        levels = []
        for k, n, change, size in zip(look.groups, counts, *look.figures.tolist(), strict=True):
            looked_at = self._last[k].numel() / n
            levels.append(self._measure.loudness(change / looked_at, size / looked_at, n, look.lr_ratio))
        if self._bar is None:
            mean = sum(level * n for level, n in zip(levels, counts, strict=True)) / sum(counts)
            self._bar = _FIRST_BAR * mean or None  # a first step at a learning rate of zero tells nothing
            return set()
        loud = set()
        for k, gap, level in zip(look.groups, look.gaps, levels, strict=True):
            if level > self._bar and self._gaps[k] >= gap:  # no exchange has come in between
                loud.add(k)
            else:
                reach = gap * math.sqrt(self._bar / level) if level > 0 else 2.0 * gap + 2
                self._asleep_until[k] = gap + max(1, int(min(reach - gap, 1e6) / 2))
        return loud

    def gap(self, groups: Sequence[int]) -> int:
        """The steps since the last exchange of one of these groups, the longest of them; this one is the first."""
        return max(1, *(self._gaps[k] for k in groups))

    def note_sent_(self, num_entries: int) -> None:
        """Note that this worker has sent so many entries, asked or answering."""
        self._share_sent += num_entries / self._vector.num_entries

    def note_exchanged_(self, groups: Sequence[int], sample: Callable[[int], Tensor]) -> None:
        """Note that these groups of the model have just been moved by an exchange.

        `sample` gives, of a group, what its entries were after their last exchange.
        """
        for k in groups:
            self._gaps[k] = 0
            self._asleep_until[k] = 0
            if self._measure is not None:
                self._last[k] = sample(k)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and tensors; a measurement under way is made again after loading."""
        return {
            "gaps": list(self._gaps),
            "asleep_until": list(self._asleep_until),
            "bar": self._bar,
            "peak_lr": self._peak_lr,
            "share_sent": self._share_sent,
            "last": [last.to("cpu", copy=True) for last in self._last],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._gaps = list(saved["gaps"])
        self._asleep_until = list(saved["asleep_until"])
        self._bar = saved["bar"]
        self._peak_lr = saved["peak_lr"]
        self._share_sent = saved["share_sent"]
        self._look = None
        if self.looks and saved["last"]:
            self._last = [last.to(self._vector.device) for last in saved["last"]]


def _squares(parts: list[Tensor]) -> Tensor:
    """The squared norm of each; a few kernels for all of them on CUDA."""
    if parts[0].device.type == "cuda":
        return torch.stack(torch._foreach_norm(parts)).square()
    return torch.stack([part.square().sum() for part in parts])
