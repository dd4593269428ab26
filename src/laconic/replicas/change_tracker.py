"""The running half of *when*: how far each group has moved since its last exchange, measured as rarely as will do."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.kernels import hash_64, to_host
from laconic.replicas.vector import ModelVector
from laconic.trigger import GossipTrigger

_LEAST_AHEAD, _MOST_AHEAD = -1.0, 8.0  # models: what peers forbade or asked for beyond that is forgotten


@dataclass
class _Measurement:
    """A measurement in flight: on CUDA its figures arrive in pinned memory while training goes on."""

    groups: list[int]
    gaps: list[int]  # when it began
    lr_ratio: float
    figures: Tensor  # (2, len(groups)) on the host: change, size
    arrived: torch.cuda.Event | None


class ChangeTracker:
    """Finds at each step the groups that are due for an exchange.

    A group is measured only when it may have reached the threshold: what is d away after g steps is foretold to be at
    most d*t/g away after t, and half of the steps to where that line meets the threshold are slept through. Of a large
    group a sample is measured. On CUDA the figures arrive a step or so later, and nothing waits for them.
    """

    def __init__(self, trigger: GossipTrigger, vector: ModelVector, seed: int, rank: int) -> None:
        self._trigger = trigger
        self._measure = trigger.measure
        self.measures = self._measure is not None  # so after an exchange a group is no longer due, whoever began it
        self._vector = vector
        self._phase = hash_64(seed, rank) / 2.0**64
        num_groups = len(vector.groups)
        self._everything = range(num_groups)
        self._gaps = [0] * num_groups
        self._asleep_until = [0] * num_groups  # the gap at which a group is measured next
        self._threshold: float | None = None if self._measure is None else self._measure.score_threshold
        self._peak_lr = 0.0
        self.lr_share = 1.0  # the learning rate over the largest so far
        self._share_sent = 0.0  # models sent since the last step
        self._ahead = 0.0  # models sent in all beyond the rate of a moving threshold
        self._measurement: _Measurement | None = None
        # What each group was after its last exchange, or a sample of it.
        self._last = [vector.sample(k) for k in self._everything] if self._measure else []
        self.passes = 0.0  # over the model, in all

    def wants(self, step: int, lr: float, *, patiently: bool, held_up: bool = False) -> list[int]:
        """The groups that are due at this step; `patiently` waits for a measurement, so that reruns are equal.

        While exchanges are `held_up`, a moving threshold does not fall: it would be too low for long afterwards.
        """
        peak_lr = self._peak_lr
        self._note_step(lr)
        moving = self._measure and self._measure.moving
        if moving and self._threshold is not None and step >= moving.warmup:
            rising = (self._peak_lr / peak_lr) ** 2 if peak_lr else 1.0  # steps of a higher rate are as much longer
            threshold = rising * moving.next_threshold(self._threshold, self._share_sent, self._ahead)
            self._threshold = max(self._threshold, threshold) if held_up else threshold
            if not held_up:
                ahead = self._ahead + self._share_sent - moving.rate
                self._ahead = min(max(ahead, _LEAST_AHEAD), _MOST_AHEAD)
        self._share_sent = 0.0
        is_due = [self._trigger.exchanges(step, gap, self._phase) for gap in self._gaps]
        awake = [k for k in self._everything if is_due[k] is None and self._gaps[k] >= self._asleep_until[k]]
        if awake and self._measurement is None:
            self._measurement = self._begin(awake)
        over = self._over_threshold(patiently)
        return [k for k in self._everything if is_due[k] or (k in over and is_due[k] is None)]

    def pair_rounds(self, step: int, lr: float) -> range:
        """The rounds of pairs, by number, that come with this step by the clock that all workers share."""
        self._note_step(lr)
        return self._trigger.pair_rounds(step)

    def _note_step(self, lr: float) -> None:
        self._peak_lr = max(self._peak_lr, lr)
        self.lr_share = lr / self._peak_lr if self._peak_lr else 1.0
        self._gaps = [gap + 1 for gap in self._gaps]

    def _begin(self, groups: list[int]) -> _Measurement:
        """Start measuring; nothing here waits for the device."""
        lasts = [self._last[k] for k in groups]
        moved = [self._vector.sample(k) - last for k, last in zip(groups, lasts, strict=True)]
        self.passes += sum(last.numel() for last in lasts) / self._vector.num_entries
        figures = torch.stack([_squares(moved), _squares(lasts)])
        host = to_host(figures)
        arrived = torch.cuda.current_stream(figures.device).record_event() if figures.is_cuda else None
        return _Measurement(groups, [self._gaps[k] for k in groups], self.lr_share, host, arrived)

    def _over_threshold(self, patiently: bool) -> set[int]:
        """The groups whose trigger score, if it has arrived, is above the threshold; the others sleep on."""
        measurement = self._measurement
        if measurement is None or self._measure is None:
            return set()
        if measurement.arrived is not None and not measurement.arrived.query():  # type: ignore[no-untyped-call]
            if not patiently:
                return set()
            measurement.arrived.synchronize()
        self._measurement = None
        counts = [max(1, self._vector.groups[k].num_trained) for k in measurement.groups]
        scores = []
        for k, n, change, size in zip(measurement.groups, counts, *measurement.figures.tolist(), strict=True):
            sampled = self._last[k].numel() / n
            scores.append(self._measure.trigger_score(change / sampled, size / sampled, n, measurement.lr_ratio))
        if self._threshold is None:
            assert self._measure.moving is not None  # others have theirs from the beginning
            mean = sum(score * n for score, n in zip(scores, counts, strict=True)) / sum(counts)
            self._threshold = (
                self._measure.moving.first_threshold(mean) or None
            )  # at a learning rate of zero nothing is known
            return set()
        over = set()
        for k, gap, score in zip(measurement.groups, measurement.gaps, scores, strict=True):
            if score > self._threshold and self._gaps[k] >= gap:  # no exchange has come in between
                over.add(k)
            else:
                reach = gap * math.sqrt(self._threshold / score) if score > 0 else 2.0 * gap + 2
                self._asleep_until[k] = gap + max(1, int(min(reach - gap, 1e6) / 2))
        return over

    def by_gap(self, groups: Sequence[int]) -> dict[int, list[int]]:
        """These groups by the steps since the last exchange of each; this one is the first."""
        groups_of: dict[int, list[int]] = {}
        for k in groups:
            groups_of.setdefault(max(1, self._gaps[k]), []).append(k)
        return groups_of

    def note_sent_(self, num_entries: int) -> None:
        """Note that this worker has sent so many entries, in requests or replies."""
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
        """Plain numbers and tensors; a measurement in flight is made again after loading."""
        return {
            "gaps": list(self._gaps),
            "asleep_until": list(self._asleep_until),
            "threshold": self._threshold,
            "peak_lr": self._peak_lr,
            "share_sent": self._share_sent,
            "ahead": self._ahead,
            "last": [last.to("cpu", copy=True) for last in self._last],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._gaps = list(saved["gaps"])
        self._asleep_until = list(saved["asleep_until"])
        self._threshold = saved["threshold"]
        self._peak_lr = saved["peak_lr"]
        self._share_sent = saved["share_sent"]
        self._ahead = saved["ahead"]
        self._measurement = None
        if self.measures and saved["last"]:
            self._last = [last.to(self._vector.device) for last in saved["last"]]


def _squares(parts: list[Tensor]) -> Tensor:
    """The squared norm of each; a few kernels for all of them on CUDA."""
    if parts[0].device.type == "cuda":
        return torch.stack(torch._foreach_norm(parts)).square()
    return torch.stack([part.square().sum() for part in parts])
