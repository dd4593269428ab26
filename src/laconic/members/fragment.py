"""A fragment's anchor with its version and outer optimizer; and as a server keeps it, with the round that is open."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from laconic.members.codec import VectorCodec
from laconic.members.masks import OpenSum, SumGrid
from laconic.members.messages import FORGOTTEN, Drift
from laconic.outer import Outer, OuterMomentum

MOST_GONE = 256  # members that are not there, of whom the server knows what became of their drifts


@dataclass
class Round:
    """What came for one version of a fragment."""

    drifts: dict[str, Drift] = field(default_factory=dict)  # by process
    called_at: float = math.inf
    num_sums: int = 0  # that were begun, of which all but the last are void
    open_sum: OpenSum | None = None  # under masks: of drifts that members have announced, with nothing in them


class AnchorState:
    """A fragment's anchor with its version, its outer optimizer, and which drift of each process it has last."""

    def __init__(self, anchor: Tensor, then: Outer, momentum: OuterMomentum | None) -> None:
        self.version = 0
        self.tokens = 0  # in drifts that were counted
        self.anchor = anchor
        self._step = torch.zeros_like(anchor)  # the outer optimizer's parameter, at zero before each step
        self._then = then
        self._momentum = momentum  # that follows from agreement
        self._optimizer = then.optimizer([self._step])
        self.counted: dict[str, tuple[int, int]] = {}  # process -> (version, number) of its last drift; in that order
        self.forgotten = -1  # the latest version of an entry that both have lost

    def move_(self, mean: Tensor, num_drifts: int, length: int = 1) -> None:
        """Put the anchor where a mean of drifts takes it; the tensor that it was stays as it is."""
        self.anchor = self.anchor + self._outer_step(mean, num_drifts, length)
        self.version += 1

    def _outer_step(self, mean: Tensor, num_drifts: int, length: int) -> Tensor:
        """What the outer optimizer makes of a mean of drifts.

        A drift may be as long as `length` usual ones, where members trained on while the server was away. It ages the
        momentum by so many rounds, and enters it as one of them: at a momentum of 0.8 the step would go 1.8 times as
        far as members have come, and 0.8 times as far again in the round after.
        """
        momentum = self._then.among(num_drifts).momentum
        if self._momentum is not None:
            momentum = self._momentum.adapt_(mean, self.anchor)
        self._optimizer.param_groups[0]["momentum"] = momentum**length
        self._step.zero_()
        self._step.grad = mean
        self._optimizer.step()
        if length > 1 and (velocity := self._optimizer.state[self._step].get("momentum_buffer")) is not None:
            velocity.sub_(mean, alpha=1 - 1 / length)
        return self._step

    def count(self, process: str, number: int, present: Collection[str]) -> None:
        """Note that the anchor has this drift of a process."""
        self._note(self.counted, process, number, present)

    def _note(self, notes: dict[str, tuple[int, int]], process: str, number: int, present: Collection[str]) -> None:
        notes.pop(process, None)
        notes[process] = self.version, number
        while len(notes) > len(present) + MOST_GONE:
            oldest = next(known for known in notes if known not in present)
            self.forgotten = max(self.forgotten, notes.pop(oldest)[0])

    def last_counted(self, process: str, version: int) -> int:
        """The number of the last drift of a process, whose anchor is of this version.

        It is FORGOTTEN where its state may hold what was counted since.
        """
        is_forgotten = process not in self.counted and 0 <= version <= self.forgotten
        return FORGOTTEN if is_forgotten else self.counted.get(process, (-1, -1))[1]

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers, by name."""
        outer_state = self._optimizer.state[self._step]
        moments = {f"outer.{name}": value for name, value in outer_state.items() if isinstance(value, Tensor)}
        if self._momentum is not None:
            agreement = self._momentum.state_dict()
            moments |= {"momentum": torch.tensor(agreement["value"])}
            moments |= {f"momentum.{i}": anchor for i, anchor in enumerate(agreement["anchors"])}
        return {
            "version": self.version,
            "tokens": self.tokens,
            "anchor": self.anchor,
            "counted": self.counted,
            "forgotten": self.forgotten,
            **moments,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what was saved."""
        self.version = int(state["version"])
        self.tokens = int(state["tokens"])
        self.anchor = torch.empty_like(self.anchor).copy_(state["anchor"])
        self.counted = {process: (int(v), int(n)) for process, (v, n) in state["counted"].items()}
        self.forgotten = int(state["forgotten"])
        if self._momentum is not None and "momentum" in state:
            anchors = [state[name] for name in (f"momentum.{i}" for i in range(len(state))) if name in state]
            self._momentum.load_state_dict({"value": float(state["momentum"]), "anchors": anchors})
        moments = {name.removeprefix("outer."): v for name, v in state.items() if name.startswith("outer.")}
        device = self._step.device
        self._optimizer.state[self._step] = {name: v.to(device, copy=True) for name, v in moments.items()}


class FragmentState(AnchorState):
    """The same at a server, which writes steps for members to read, and keeps what rounding held back of the last."""

    def __init__(
        self, anchor: Tensor, codec: VectorCodec, then: Outer, momentum: OuterMomentum | None, grid: SumGrid | None
    ) -> None:
        super().__init__(anchor, then, momentum)
        self.residual = torch.zeros_like(anchor)
        self.codec = codec
        self.grid = grid  # under masks
        self.round = Round()
        self.bequeathed = torch.zeros_like(anchor)  # by members that left, times their weights
        self.bequeathed_tokens = 0
        self.departed: dict[str, tuple[int, int]] = {}  # of who handed over what it owed

    def step_(self, mean: Tensor | None, number: int, num_drifts: int, length: int = 1) -> Tensor:
        """Move the anchor by a mean of drifts as far as the codec can write it; the bytes that move all others'.

        A round of nothing makes no outer step: momentum alone would carry the anchor on.
        """
        owed = self.residual
        if mean is not None:
            owed = self._outer_step(mean, max(1, num_drifts), length) + self.residual
        payload, moved = self.codec.encode_all(owed, (number, self.version))
        self.residual = owed - moved
        self.anchor.add_(moved)
        self.version += 1
        self.round = Round()
        self.bequeathed.zero_()
        self.bequeathed_tokens = 0
        return payload

    def count(self, process: str, number: int, present: Collection[str]) -> None:
        super().count(process, number, present)
        self.departed.pop(process, None)  # a process that handed over this fragment, and was back for the others

    def inherit_(self, process: str, values: Tensor, tokens: int, present: Collection[str]) -> None:
        """Take what a process that leaves has not sent, to be added to the next mean."""
        self.bequeathed.add_(values, alpha=float(tokens))
        self.bequeathed_tokens += tokens
        self.depart(process, present)

    def depart(self, process: str, present: Collection[str]) -> None:
        """Note that a process owes nothing any more."""
        self._note(self.departed, process, -1, present)

    def last_round(self) -> set[str]:
        """The processes in the last round that was closed, but for those that have left since."""
        last = {process for process, (version, _) in self.counted.items() if version == self.version - 1}
        return last - self.departed.keys()

    def last_counted(self, process: str, version: int) -> int:
        return FORGOTTEN if process in self.departed else super().last_counted(process, version)

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "residual": self.residual,
            "bequeathed": self.bequeathed,
            "bequeathed_tokens": self.bequeathed_tokens,
            "departed": self.departed,
            **({} if self.grid is None else {"exponents": self.grid.exponents}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.residual.copy_(state["residual"])
        self.bequeathed.copy_(state["bequeathed"])
        self.bequeathed_tokens = int(state["bequeathed_tokens"])
        self.departed = {process: (int(v), int(n)) for process, (v, n) in state["departed"].items()}
        if self.grid is not None:
            self.grid = replace(self.grid, exponents=state["exponents"])
