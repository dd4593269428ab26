"""Train alone, and exchange models with peers when there is something to say."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic import kernels
from laconic.errors import StateError
from laconic.exchange import check_peers
from laconic.fault_points import fault_point
from laconic.quantize import is_residue
from laconic.replicas.gossip.changed_entries import EntryMessages
from laconic.replicas.gossip.free import Free
from laconic.replicas.gossip.matched import Matched
from laconic.replicas.gossip.messages import GroupMessages, MessageWriter
from laconic.replicas.gossip.momentum import Momentum, QuasiGlobalMomentum
from laconic.replicas.gossip.paired import Paired
from laconic.replicas.gossip.remainders import RemainderMessages
from laconic.replicas.gossip.stats import FollowerStats
from laconic.replicas.gossip.tracker import ChangeTracker
from laconic.replicas.gossip.vector import ModelVector
from laconic.scheme import GossipScheme
from laconic.session import PHASES, SavedTogether
from laconic.transport import Mailbox, Transport, ring_bytes

_FORMAT = 4
_KEPT = ("last", "remainders")  # by message writers, under these names
_SIDES: dict[str, Any] = {"free": Free, "paired": Paired, "wait": Free, "matched": Matched}


class Follower(SavedTogether):
    """One worker of a gossip; call `step()` after each `optimizer.step()`.

    `end` is this worker's end of the network: a Transport where the pattern's mode is `matched`, otherwise a Mailbox.
    """

    error: BaseException | None = None  # what goes wrong in another thread is raised by the next step

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scheme: GossipScheme, end: Transport | Mailbox
    ) -> None:
        pattern = scheme.exchange
        check_peers(pattern.peers, end.num_workers)
        self.scheme = scheme
        self.rank = end.rank
        self.num_workers = end.num_workers
        self._optimizer = optimizer
        in_halves = pattern.mode == "paired" and not scheme.chooses
        self._vector = ModelVector(model, "half" if in_halves else scheme.trigger.per, scheme.select.dense_below)
        messages = _message_writer(scheme, self._vector, end)
        tracker = ChangeTracker(scheme.trigger, self._vector, pattern.seed, end.rank)
        momentum = QuasiGlobalMomentum(optimizer) if pattern.momentum == "quasi-global" else Momentum()
        self._side: Matched | Free = _SIDES[pattern.mode](end, pattern, self._vector, messages, tracker, momentum)
        self._steps = 0
        self._seconds = 0.0
        self._first_step = 0  # since a state was loaded: what is counted begins there
        self._closed = False

    def step(self) -> None:
        """Move by what exchanges have brought and take part in those that are due, waiting as the mode says."""
        self._check_open()
        fault_point("gossip.step")
        start = time.perf_counter()
        lr = max(float(group["lr"]) for group in self._optimizer.param_groups)
        self._side.step(self._steps, lr)
        self._steps += 1
        self._seconds += time.perf_counter() - start

    def average_(self) -> None:
        """Give every worker the mean of the models of all that are alive; a call that all of those make."""
        mean = self._settled_mean("average")
        self._vector.write_(mean)
        self._side.note_all_said_()
        self._side.settle()  # nobody is told of a model from before

    def settle(self) -> None:
        """Wait until nothing is under way anywhere, and move by what exchanges owe; a call that all workers make."""
        self._check_open()
        self._side.settle()

    def consensus(self) -> tuple[Tensor, float]:
        """(the mean of all models as one vector, this one's distance to it over its norm); a call that all make.

        It serves measuring: nothing of it is counted or changes a model, but for what exchanges owe being applied.
        """
        mean = self._settled_mean(None)
        distance = (self._vector.read() - mean).double().norm() / mean.double().norm()
        return mean, float(distance)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this follower is closed; step and average before close()")

    def _settled_mean(self, kind: str | None) -> Tensor:
        self.settle()
        return self._side.mean(self._vector.read(), kind)

    def write_(self, values: Tensor) -> None:
        """Overwrite the model with a vector like that of `consensus`."""
        self._vector.write_(values)

    def read(self) -> Tensor:
        """The model as one vector, normalisation buffers included."""
        return self._vector.read()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The same numbers of all workers that are alive, in rank order; a call that all of those make."""
        return self._side.gather(torch.tensor(values, dtype=torch.float64)).tolist()

    def stats(self, *, ages: bool = False) -> FollowerStats:
        """Bytes out and in, by kind; exchanges; peers lost."""
        side = self._side
        traffic = side.end.traffic
        num_steps = self._steps - self._first_step
        dense = ring_bytes(4 * self._vector.num_entries, self.num_workers) * num_steps
        return FollowerStats(
            scheme=str(self.scheme),
            kernels=kernels.backend(self._vector.device),
            num_workers=self.num_workers,
            steps=self._steps,
            first_step=self._first_step,
            skipped_steps=0,
            bytes_out=traffic.bytes_out,
            bytes_in=traffic.bytes_in,
            dense_bytes_out=dense,
            by_kind=traffic.copy(),
            seconds={**dict.fromkeys(PHASES, 0.0), "exchange": self._seconds},
            passes=side.tracker.passes / max(1, num_steps),
            asked=side.asked,
            answered=side.answered,
            refused=side.refused,
            late=side.late,
            lost=dict(side.lost),
        )

    def state_dict(self) -> dict[str, Any]:
        """This worker's state as plain tensors and numbers, to be saved per rank beside its model and optimizer."""
        return {
            "format": _FORMAT,
            "scheme": str(self.scheme),
            "step": self._steps,
            "rank": self.rank,
            "num_workers": self.num_workers,
            "groups": [group.num_entries for group in self._vector.groups],
            "watch": self._side.tracker.state_dict(),
            "owed": self._side.owed,
            **self._side.messages.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from this rank's state, or from the list of all ranks' states; before any rank steps.

        A rank that had died before they were saved has none in that list: it goes on from its model as it is.
        """
        states = [saved] if isinstance(saved, Mapping) else list(saved)
        if states[0].get("format") != _FORMAT or "watch" not in states[0]:
            raise StateError("this is no state of a follower of this version; load what Follower.state_dict() gave")
        mine = [state for state in states if state["rank"] == self.rank]
        had_died = not mine and not isinstance(saved, Mapping)
        if not (mine or had_died) or states[0]["num_workers"] != self.num_workers:
            raise StateError(
                f"the state is of {states[0]['num_workers']} workers, and this is rank {self.rank} of "
                f"{self.num_workers}; gossip resumes with the same number of workers"
            )
        self._steps = self._first_step = int(states[0]["step"])
        if had_died:
            self._side.note_all_said_()
            return
        (own,) = mine
        kept = {name for name in _KEPT if own.get(name) is not None}
        if kept != self._side.messages.state_dict().keys():
            raise StateError(f"the state is of {own['scheme']}; resume with that scheme")
        if own["groups"] != [group.num_entries for group in self._vector.groups]:
            raise StateError("the state is of another model or of other groups; resume with the same model and scheme")
        self._side.tracker.load_state_dict(own["watch"])
        self._side.messages.load_state_dict(own)
        self._side.owe(own["owed"])

    def close(self) -> None:
        """Ask nobody any more."""
        self._closed = True
        self._side.close()


def _message_writer(scheme: GossipScheme, vector: ModelVector, end: Transport | Mailbox) -> MessageWriter:
    quantize = scheme.quantize
    if is_residue(quantize):
        return RemainderMessages(vector, quantize, scheme.exchange.seed, end.rank)
    if scheme.chooses:
        return EntryMessages(vector, quantize, scheme.select, end.num_workers)
    return GroupMessages(vector, quantize)
