"""Gossip: two workers at a time exchange models and move to their middle. Here what all modes share, and `matched`."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from laconic import kernels
from laconic.errors import FrameError, StateError
from laconic.exchange import asks_of, check_peers, matching
from laconic.fault_points import armed, fault_point
from laconic.quantize import is_modulo_code
from laconic.replicas.change_tracker import ChangeTracker
from laconic.replicas.messages import EntryMessages, GroupMessages, MessageWriter, ModuloMessages, refusal
from laconic.replicas.optimizers import Optimizers, listed
from laconic.replicas.policy import Policy, State
from laconic.replicas.vector import ModelVector, PendingUpdate, Subset
from laconic.scheme import GossipScheme
from laconic.transport import Collectives, Mailbox, Transport, rows_of

_LEAST_LR_SHARE = 0.01  # of the largest so far: below, update/lr says more of where a model was than will be


class QuasiGlobalMomentum:
    """v -= (1 - mu^g)/g * update/lr, where SGD does v = mu*v + gradient, x -= lr*v, and after g steps x += update.

    So what peers do to a model counts as steps that it made, and two momenta draw near to each other as the models do,
    without a byte (at g = 1 quasi-global momentum, Lin et al., ICML 2021; the share for more steps is ours: by itself
    (1 - mu) would carry rare exchanges on to the other's place). Updates are opposites, so the sum of both momenta is
    unchanged where rates and gaps are the same. An optimizer other than SGD keeps its own.
    """

    def __init__(self, optimizer: Optimizers) -> None:
        self._optimizers = [one for one in listed(optimizer) if isinstance(one, torch.optim.SGD)]

    @torch.no_grad()
    def follow_(self, moved: list[tuple[Tensor, Tensor]], gap: int, lr_share: float) -> None:
        """Overwrite the momenta of parameters that were moved: (parameter or buffer, update) of each.

        `gap` is how many steps the updates are about, `lr_share` the learning rate over the largest so far.
        """
        if not self._optimizers or lr_share < _LEAST_LR_SHARE:
            return
        updates = {id(tensor): update for tensor, update in moved}
        for optimizer, group in ((one, group) for one in self._optimizers for group in one.param_groups):
            lr = float(group["lr"])
            mu = group["momentum"]
            velocities: list[Tensor] = []
            followed: list[Tensor] = []
            for parameter in group["params"] if lr and mu else []:
                velocity = optimizer.state.get(parameter, {}).get("momentum_buffer")
                if velocity is not None and not velocity.is_sparse and id(parameter) in updates:
                    velocities.append(velocity)
                    followed.append(updates[id(parameter)].view(velocity.shape))
            if velocities:
                torch._foreach_add_(velocities, followed, alpha=(mu**gap - 1) / (gap * lr))


_NOTHING = torch.empty(0, dtype=torch.uint8)
_KEPT = ("last", "modulo")  # by message writers, under these names


class GossipPolicy(Policy):
    """One worker's model, and all that its exchanges go through, whichever way they are made.

    Args:
        model: The model.
        optimizer: The one that trains it, or several.
        scheme: What is sent of the model, to whom, and when.
        end: This worker's end of the network: where all workers meet at each step a transport, otherwise a Mailbox.
    """

    scheme: GossipScheme
    end: Any

    def __init__(self, model: nn.Module, optimizer: Optimizers, scheme: GossipScheme, end: Transport | Mailbox) -> None:
        pattern = scheme.exchange
        check_peers(pattern.peers, end.num_workers)
        in_halves = pattern.mode == "paired" and not scheme.selects
        self.scheme = scheme
        self.end = end
        self.rank = end.rank
        self.num_workers = end.num_workers
        self.pattern = pattern
        self.vector = ModelVector(model, "half" if in_halves else scheme.trigger.per, scheme.select.dense_below)
        self.num_dense = self.vector.num_entries
        self.messages = _message_writer(scheme, self.vector, end)
        self.tracker = ChangeTracker(scheme.trigger, self.vector, pattern.seed, end.rank)
        self.optimizers = listed(optimizer)
        self._momentum = QuasiGlobalMomentum(optimizer) if pattern.momentum == "quasi-global" else None
        self._pending = PendingUpdate(self.vector)
        self.lost: dict[int, str] = {}
        self.num_asked = self.answered = self.refused = self.late = 0

    @property
    def _lr(self) -> float:
        return max(float(group["lr"]) for one in self.optimizers for group in one.param_groups)

    def send_due(self, step: int) -> None:
        if armed:
            fault_point("gossip.step")
        self.exchange_due(step)

    @abstractmethod
    def exchange_due(self, step: int) -> None:
        """Exchange with peers what is due after this step."""

    def move_(self) -> None:
        """Add the pending update to the model; momentum and tracker follow."""
        if armed:
            fault_point("gossip.apply")
        groups = sorted(self._pending.groups)
        for gap, of_gap in self.tracker.by_gap(groups).items():
            moved = self.vector.move_(self._pending.whole, of_gap)
            if self._momentum is not None:
                self._momentum.follow_(moved, gap, self.tracker.lr_share)
        self._pending.groups = set()
        self.tracker.note_exchanged_(groups, self.messages.sample)

    def average_(self, step: int) -> None:
        self.settle(step)
        self.vector.write_(self.mean(self.vector.read(), "average"))
        self.note_known_()
        self.settle(step)  # nobody is sent a model from before

    def measured_mean(self, step: int) -> Tensor:
        """The mean of all models, not counted; pending updates are applied before."""
        self.settle(step)
        return self.mean(self.vector.read(), None)

    @abstractmethod
    def mean(self, own: Tensor, kind: str | None) -> Tensor:
        """The mean over all workers that are alive; of no kind, it is not counted."""

    def note_known_(self) -> None:
        """Take the model as it is for what peers know of it."""
        self.messages.note_known_()
        self.tracker.note_exchanged_(range(len(self.vector.groups)), self.messages.sample)

    def stats(self, num_steps: int, *, ages: bool) -> dict[str, Any]:
        traffic = self.end.traffic
        return {
            "skipped_steps": 0,
            "bytes_out": traffic.bytes_out,
            "bytes_in": traffic.bytes_in,
            "by_kind": traffic.copy(),
            "passes": self.tracker.passes / max(1, num_steps),
            "asked": self.num_asked,
            "answered": self.answered,
            "refused": self.refused,
            "late": self.late,
            "lost": dict(self.lost),
        }

    def totals(self) -> dict[str, float]:
        traffic = self.end.traffic
        return {
            "bytes_out": traffic.bytes_out,
            "bytes_in": traffic.bytes_in,
            "rounds": self.num_asked + self.answered,
            "skipped": self.refused,
        }

    @property
    def num_members(self) -> int:
        return self.num_workers - len(self.lost)

    def state_dict(self) -> dict[str, Any]:
        return {
            "groups": [group.num_entries for group in self.vector.groups],
            "tracker": self.tracker.state_dict(),
            "pending": self._pending.read(),
            **self.messages.state_dict(),
        }

    def load_state_dict(self, states: Sequence[State], own: State | None) -> None:
        """Go on from this rank's state; one that had died before all were saved goes on from its model as it is."""
        if states[0]["num_workers"] != self.num_workers:
            raise StateError(
                f"the state is of {states[0]['num_workers']} workers, and this is rank {self.rank} of "
                f"{self.num_workers}; gossip resumes with the same number of workers"
            )
        if own is None:
            self.note_known_()
            return
        kept = {name for name in _KEPT if own.get(name) is not None}
        if "tracker" not in own or kept != self.messages.state_dict().keys():
            raise StateError(f"the state is of {own['scheme']}; resume with that scheme")
        if own["groups"] != [group.num_entries for group in self.vector.groups]:
            raise StateError("the state is of another model or of other groups; resume with the same model and scheme")
        self.tracker.load_state_dict(own["tracker"])
        self.messages.load_state_dict(own)
        self._pending.write_(own["pending"])


class MatchedGossip(GossipPolicy):
    """Gossip in step, for runs that repeat bit for bit: pairs are drawn from (seed, step).

    Every worker calls each method at the same time, and gathers from all which groups they want to exchange.
    """

    end: Collectives

    def apply_due_(self, step: int) -> None:
        """Nothing is ever pending between two steps."""

    def exchange_due(self, step: int) -> None:
        """x += (x_peer - x)/2 for what one of a pair wants to exchange."""
        number = step - 1
        pattern = self.pattern
        wanted = self.tracker.wants(number, self._lr, patiently=True)
        flags = torch.zeros(len(self.vector.groups), dtype=torch.uint8)
        flags[torch.tensor(wanted, dtype=torch.int64)] = 1
        all_flags = self.end.all_gather(flags.to(self.vector.device), "flags").cpu()
        partner = matching(pattern.peers, pattern.seed, number, self.num_workers)[self.rank]
        groups = torch.nonzero(all_flags[self.rank] | all_flags[partner]).view(-1).tolist()
        if partner == self.rank or not groups:
            for _ in ("request", "reply"):
                self._swap(_NOTHING, self.rank, 0)
            return
        asks = asks_of(pattern.seed, number, self.rank, partner)
        subset, update = self._ask(groups, partner) if asks else self._answer(groups, partner)
        self.tracker.note_sent_(subset.num_entries)
        self._pending.add_(subset, update)
        self.move_()
        self.num_asked += asks
        self.answered += not asks

    def _ask(self, groups: list[int], partner: int) -> tuple[Subset, Tensor]:
        """(what the exchange was about, the update to the middle)."""
        subset = self.messages.subset(groups)
        values = subset.read()
        request = self.messages.request_(subset, values) if kernels.all_finite(values) else None
        message = request.message if request else refusal(self.messages.request_bytes(groups))
        self._swap(message, partner, 0)
        reply = self._swap(_NOTHING, partner, self.messages.reply_bytes(groups))
        if request is None:
            raise FrameError(f"the model of rank {self.rank} is not finite")
        return request.subset, self.messages.finish_(request, reply, partner)

    def _answer(self, groups: list[int], partner: int) -> tuple[Subset, Tensor]:
        """The same at the other end."""
        message = self._swap(_NOTHING, partner, self.messages.request_bytes(groups))
        try:
            subset, received = self.messages.open(message, partner)
        except FrameError as error:
            self._swap(refusal(self.messages.reply_bytes(groups)), partner, 0)
            raise FrameError(f"rank {partner} sent no request that can be answered: {error}") from None
        reply, update = self.messages.reply_(subset, received, subset.read())
        self._swap(reply, partner, 0)
        if update is None:
            raise FrameError(f"the model of rank {self.rank} is not finite")
        return subset, update

    def _swap(self, message: Tensor, partner: int, num_back: int) -> Tensor:
        return self.end.sendrecv(message.to(self.vector.device), partner, "model", num_back)

    def settle(self, step: int) -> None:
        """Nothing is ever in flight between two steps."""

    def mean(self, own: Tensor, kind: str | None) -> Tensor:
        total = own.to(self.vector.device, copy=True)
        with nullcontext() if kind else self.end.traffic.uncounted():
            self.end.all_reduce_(total, kind or "measured")
        return total.to(own.device) / self.num_workers

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return rows_of(self.end, values)

    def close(self) -> None:
        """Only note it: the transport belongs to whoever made it."""
        self.closed = True


def _message_writer(scheme: GossipScheme, vector: ModelVector, end: Transport | Mailbox) -> MessageWriter:
    quantize = scheme.quantize
    if is_modulo_code(quantize):
        return ModuloMessages(vector, quantize, scheme.exchange.seed, end.rank)
    if scheme.selects:
        return EntryMessages(vector, quantize, scheme.select, end.num_workers)
    return GroupMessages(vector, quantize)
