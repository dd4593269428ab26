"""Then what: how an anchor moves by the drift of its worker and of others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laconic.errors import SchemeError

_SAMPLE_ENTRIES = 1 << 16  # of a fragment, for a cosine that is off by 1/256 in the mean square


@dataclass(frozen=True, kw_only=True)
class Outer:
    """An outer step: workers exchange their drift, the mean of which is the gradient D of the anchor."""

    pulls = False  # whether it brings anchors together that differ between workers
    momentum = 0.0

    lr: float

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise SchemeError(f"{type(self).__name__}.lr is {self.lr}; give a rate above 0, 1 for the mean itself")

    def contribution(self, anchor: Tensor, drift: Tensor) -> Tensor:
        """The vector that a worker sends."""
        return drift

    def gradient(self, anchor: Tensor, mean: Tensor) -> Tensor:
        """D, from the mean of all contributions."""
        return mean

    def optimizer(self, anchors: Sequence[Tensor]) -> torch.optim.Optimizer:
        """The optimizer that steps the anchors by D in their `.grad`."""
        return torch.optim.SGD(anchors, lr=self.lr)

    def among(self, num_workers: int) -> Outer:
        """The outer step of so many workers, where that matters."""
        return self

    def averaging(self) -> Outer:
        """The outer step of a warm-up, whose D takes an anchor to the mean: anchor -= D."""
        return OuterSGD()


@dataclass(frozen=True, kw_only=True)
class OuterSGD(Outer):
    """anchor -= lr * D: with lr=1 the mean of all models, which is plain averaging (local SGD, Stich 2019)."""

    lr: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Nesterov(Outer):
    """b = momentum*b + D ; anchor -= lr * (D + momentum*b), as in DiLoCo (Douillard et al., 2311.08105)."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.momentum < 1:
            raise SchemeError(f"Nesterov.momentum is {self.momentum}; give a number in (0, 1), or use sgd")

    def optimizer(self, anchors: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(anchors, lr=self.lr, momentum=self.momentum, nesterov=True)


@dataclass(frozen=True, kw_only=True)
class NesterovByWorkers(Nesterov):
    """Nesterov's step with more momentum the more workers there are: `momentum` up to 4, `most` from 16 on.

    The mean of many drifts has less noise, and bears more of it (MuLoCo, Therien et al., 2505.23725).
    """

    momentum: float = 0.6
    most: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.momentum <= self.most < 1:
            raise SchemeError(f"NesterovByWorkers.most is {self.most}; give a number in [momentum, 1)")

    def among(self, num_workers: int) -> Outer:
        share = min(1.0, max(0.0, math.log2(num_workers / 4) / 2))
        return Nesterov(lr=self.lr, momentum=self.momentum + share * (self.most - self.momentum))


@dataclass(frozen=True, kw_only=True)
class Agreement(Nesterov):
    """Nesterov's step, whose momentum mu follows how far D goes along the outer step of `lag` rounds ago (ours).

        q = cos(D, that step) ; mu += h*gain*(q - aim), held in [0, momentum], h = min(1, H/16)

    A drift that still goes along an earlier step asks for more of it; one against it says that the step went too far.
    The lag outlasts the inner optimizer's own momentum beta, which by itself makes successive drifts alike: of white
    noise at H = 16 and beta = 0.9 their cosine is 0.38. Short rounds are many and noisy, so each of them counts less.
    mu begins at 0: momentum from the first rounds on is worth 0.1 % to a small GPT, and costs an LSTM 4 to 9 %.
    """

    lr: float = 1.0
    momentum: float = 0.7  # the most: up to 0.8 more cells are over 1 % behind the best of 0, 0.6 and 0.9
    aim: float = 0.05
    gain: float = 0.5

    _LEAST = 1e-6  # instead of 0, at which torch's SGD would leave its buffer as it was
    _WHOLE_AT = 16  # steps of a round, from which on it counts whole
    _MEMORIES = 2.5  # times 1/(1 - beta) steps, after which an inner optimizer has forgotten 0.92 of a gradient

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gain > 0:
            raise SchemeError(f"Agreement.gain is {self.gain}; give a number above 0, 0.5 is usual")

    def lag(self, every: int, inner_momentum: float) -> int:
        """The rounds of `every` steps after which an inner optimizer of such momentum has forgotten."""
        return max(1, math.ceil(self._MEMORIES / (1 - inner_momentum) / every - 1e-9))  # 25 steps of 0.9, not 25.000001

    def adapted(self, momentum: float, agreement: float, every: int) -> float:
        """The momentum after a round of `every` steps and this agreement q."""
        change = self.gain * min(1.0, every / self._WHOLE_AT) * (agreement - self.aim)
        return min(self.momentum, max(self._LEAST, momentum + change))


class OuterMomentum:
    """The outer momentum of one fragment by agreement: the same on all workers, who compute it from the same D.

    Of the anchors of the last rounds it keeps a sample of fixed random entries in the host's memory, 256 KiB of each at
    most: a whole copy for every round of the lag would cost more than all else that outer steps keep.
    """

    def __init__(self, rule: Agreement, anchor: Tensor, every: int, inner_momentum: float) -> None:
        self.lag = lag = rule.lag(every, inner_momentum)
        self._every = every
        self.value = torch.zeros(1, device=anchor.device)
        self._rule = rule
        self._entries: Tensor | None = None  # all
        if anchor.numel() > _SAMPLE_ENTRIES:
            draw = torch.Generator().manual_seed(0)
            self._entries = torch.randint(anchor.numel(), (_SAMPLE_ENTRIES,), generator=draw).to(anchor.device)
        self._anchors: deque[Tensor] = deque(maxlen=lag + 1)  # before each of the last rounds

    @classmethod
    def of(cls, then: Outer, anchor: Tensor, every: int, inner_momentum: float) -> OuterMomentum | None:
        """That of an outer step for one fragment; None where its momentum does not adapt."""
        return cls(then, anchor, every, inner_momentum) if isinstance(then, Agreement) else None

    def adapt_(self, gradient: Tensor, anchor: Tensor) -> float:
        """Move the momentum by the agreement of D with the step of `lag` rounds ago, once there is one; return it."""
        self._anchors.append(self._sample(anchor))
        agreement = self._rule.aim  # which changes nothing
        if len(self._anchors) > self.lag:
            agreement = _cosine(self._sample(gradient), self._anchors[0] - self._anchors[1])
        self.value.fill_(self._rule.adapted(float(self.value), agreement, self._every))
        return float(self.value)

    def _sample(self, flat: Tensor) -> Tensor:
        """A copy on the host."""
        return (flat if self._entries is None else flat[self._entries]).to("cpu", copy=True)

    def state_dict(self) -> dict[str, Any]:
        """The momentum, and the anchors between which the steps lie."""
        return {"value": float(self.value), "anchors": list(self._anchors)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state; where the lag was longer, from its latest anchors."""
        self.value.fill_(saved["value"])
        self._anchors = deque((anchor.clone() for anchor in saved["anchors"]), maxlen=self.lag + 1)


def _cosine(a: Tensor, b: Tensor) -> float:
    """The cosine, on a grid so fine as not to matter: in what order a processor adds does not show."""
    a, b = a.double(), b.double()
    norms = float(a.norm() * b.norm())
    return round(float(a @ b) / norms, 6) if norms else 0.0


@dataclass(frozen=True, kw_only=True)
class PairMomentum(Outer):
    """b = momentum*b - lr*mean(d_i, d_j) - pull*(a_i - mean(a_i, a_j)) ; a_i += b: NoLoCo (2506.10911).

    a_i is a worker's own anchor, d_i its drift, j its partner. One vector has both (ours): s = a - lr/pull * d, since
    pull * D = pull * (a_i - mean(s_i, s_j)) is the two terms. With pull = lr, as in the paper's code, s is the model.

    Where nobody drifts, anchors of many workers in random pairs come together in mean square if and only if
    pull < 2*(1 - momentum^2), which is 1.5 for momentum 0.5. More is not better: at 0.7 a round leaves 0.70 of their
    squared distance, at 1.35 0.93. Where all drift at random, they stay nearest at 0.7 to 0.9 (8 to 32 workers).
    """

    pulls = True

    lr: float = 0.7
    momentum: float = 0.5
    pull: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise SchemeError(f"PairMomentum.momentum is {self.momentum}; give a number in [0, 1)")
        most = 2 * (1 - self.momentum**2)
        if not 0 < self.pull < most:
            raise SchemeError(
                f"PairMomentum.pull is {self.pull}; give a number in (0, {most:g}), that is 2*(1 - momentum^2); beyond "
                "it anchors fly apart"
            )

    def contribution(self, anchor: Tensor, drift: Tensor) -> Tensor:
        return anchor.sub(drift, alpha=self.lr / self.pull)

    def gradient(self, anchor: Tensor, mean: Tensor) -> Tensor:
        return anchor - mean

    def optimizer(self, anchors: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(anchors, lr=self.pull, momentum=self.momentum)

    def averaging(self) -> Outer:
        return replace(self, lr=1.0, momentum=0.0, pull=1.0)


OUTERS: dict[str, type[Outer]] = {
    "sgd": OuterSGD,
    "nesterov": Nesterov,
    "nesterov-by-workers": NesterovByWorkers,
    "agreement": Agreement,
    "pair-momentum": PairMomentum,
}
