"""Follower: a model that trains apart from others, and what it is called for, whatever its policy."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from laconic import kernels
from laconic.errors import StateError
from laconic.replicas.free_gossip import FreeGossip, PairedGossip
from laconic.replicas.gossip import GossipPolicy, MatchedGossip
from laconic.replicas.optimizers import Optimizers, StepReminder
from laconic.replicas.policy import Policy, State, header, states_of
from laconic.replicas.rounds import OuterRounds
from laconic.scheme import GossipScheme, OuterScheme
from laconic.session import PHASES, Observed, Stats, metrics_of, step_ends, summary
from laconic.transport import ring_bytes

_GOSSIP: dict[str, type[GossipPolicy]] = {
    "free": FreeGossip,
    "wait": FreeGossip,
    "paired": PairedGossip,
    "matched": MatchedGossip,
}


@dataclass(frozen=True)
class FollowerStats(Stats):
    """One worker's account; `seconds` is what its training thread spent, in `exchange`.

    `skipped_steps` are rounds in which some worker's drift was not finite: nobody who received it moved by them.
    """

    rounds: int = 0  # outer: fragments whose result was applied
    late_rounds: int = 0  # of those, agreed on without this worker, whose drift came too late and went later
    waited_s: float | None = None  # outer: for results that had not come when they were due
    background_s: dict[str, float] = field(default_factory=dict)  # outer: by phase, while training went on
    momentum: float | None = None  # outer: of the outer step, in the mean over fragments
    asked: int = 0  # gossip: exchanges that this worker began, and were answered
    answered: int = 0  # gossip: exchanges that a peer began
    refused: int = 0  # gossip: exchanges left out because one side's model was not finite
    late: int = 0  # gossip: answers that took longer than the patience; they count when they come
    lost: dict[int, str] = field(default_factory=dict)  # gossip: peers that have died, and what was seen of it

    def __str__(self) -> str:
        steps = self.steps_here
        gone = f"; without rank {', '.join(map(str, sorted(self.lost)))}" if self.lost else ""
        if self.waited_s is None:
            exchanges = f"{self.asked} exchanges asked and {self.answered} answered"
            detail = f"{(self.passes or 0):.2f} passes over the model a step"
        else:
            exchanges = f"{self.rounds} rounds" + (f" ({self.late_rounds} without it)" if self.late_rounds else "")
            detail = f"{1e3 * self.waited_s / steps:.2f} ms of that waiting"
        spent = f"{1e3 * self.seconds['exchange'] / steps:.2f} ms a step in the training thread"
        return summary(self, lost=gone, exchanges=f"{exchanges}, ", rest=f"{spent}, {detail}; {self.kernels} kernels")


class Follower(Observed):
    """One worker that trains apart; call `step()` after each `optimizer.step()`.

    The clock counts calls of `step()`. Its policy says what is due then: outer rounds among all workers or in pairs,
    or exchanges of a gossip.

    Args:
        policy: One of `OuterRounds`, `MatchedGossip`, `FreeGossip` and `PairedGossip`.
    """

    def __init__(self, policy: Policy) -> None:
        self._begin(policy)

    def _begin(self, policy: Policy) -> None:
        """Count anew, under this policy."""
        self.policy = policy
        self.scheme = policy.scheme
        self.vector = policy.vector  # the model as one vector
        self.rank = policy.rank
        self.num_workers = policy.num_workers
        self._steps = 0
        self._first_step = 0  # since a state was loaded: what is counted begins there
        self._seconds = 0.0  # of the training thread
        self._step_ends = step_ends()
        self._reminder = StepReminder(policy.optimizers, "follower.step()")

    @property
    def error(self) -> BaseException | None:
        """What went wrong in another thread; the next step raises it."""
        return self.policy.error

    def step(self) -> None:
        """Apply what is due, send what is due, and wait as the scheme says."""
        self._check_open()
        self.policy.raise_error()
        if self._steps == self._first_step:
            self._reminder.stop()
        with self._timed():
            self._steps += 1
            self.policy.apply_due_(self._steps)
            self.policy.send_due(self._steps)
            self.policy.apply_due_(self._steps)  # results that nobody trains on without
        self._step_ends.append(self._totals())

    def settle(self) -> None:
        """Wait until no update is pending anywhere, and apply them now; a call that all workers make."""
        self._check_open()
        with self._timed():
            self.policy.settle(self._steps)

    def average_(self) -> None:
        """Give every worker the mean of the models of all that are alive; a call that all of those make."""
        self._check_open()
        with self._timed():
            self.policy.average_(self._steps)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model be the mean of all inside the block, and behind it what it was; a call that all workers make.

        It is for evaluation: training goes on as if it had not been, and its exchange is not counted.

        Example:
            >>> with follower.averaged():
            ...     loss = model(torch.ones(1, 8)).mean()
        """
        self._check_open()
        mean = self.policy.measured_mean(self._steps)
        own = self.vector.read()
        self.vector.write_(mean)
        try:
            yield
        finally:
            self.vector.write_(own)

    def check_replicas_(self) -> None:
        """Compare the anchors of all workers now; a call that all make between steps. In gossip there is none."""
        self._check_open()
        self.policy.check_replicas_()

    def stats(self, *, ages: bool = False) -> FollowerStats:
        """Bytes out and in, by kind; exchanges; what the training thread spent, and what passed in the background."""
        num_steps = self._steps - self._first_step
        return FollowerStats(
            **{
                **self.policy.stats(num_steps, ages=ages),
                "scheme": str(self.scheme),
                "kernels": kernels.backend(self.vector.device),
                "num_workers": self.num_workers,
                "steps": self._steps,
                "first_step": self._first_step,
                "dense_bytes_out": ring_bytes(4 * self.policy.num_dense, self.num_workers) * num_steps,
                "seconds": {**dict.fromkeys(PHASES, 0.0), "exchange": self._seconds},
            }
        )

    def metrics(self) -> dict[str, float]:
        """The numbers of the last step: step, bytes_out, bytes_in, ratio, rounds, skipped, members.

        `training_ms` is what the training thread spent in step(), `waited_ms` what of that it waited; ms by phase are
        of exchanges that ended meanwhile in the background.
        """
        return metrics_of(self._step_ends, step=self._steps, members=self.policy.num_members)

    def _totals(self) -> dict[str, float]:
        dense = ring_bytes(4 * self.policy.num_dense, self.num_workers) * (self._steps - self._first_step)
        return {**self.policy.totals(), "dense_bytes_out": dense, "training_ms": 1e3 * self._seconds}

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count what the training thread spends inside."""
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    def state_dict(self) -> dict[str, Any]:
        """This worker's state as plain tensors and numbers, to be saved per rank beside its model and optimizer.

        Exchanges in the background are waited for; their results are saved with it, to be applied when they are due.
        """
        policy = self.policy
        kept = policy.state_dict()
        return {**header(self.scheme, self._steps, policy.rank, policy.num_workers, policy.shard), **kept}

    def load_state_dict(self, saved: State | Sequence[State]) -> None:
        """Continue from this rank's state, or from the list of all ranks' states; before any rank steps.

        Raises:
            StateError: The state is of another version, model, scheme or number of workers than can go on from it.
        """
        states, own = states_of(saved, self.rank, self.num_workers, self.policy.shard)
        self.policy.load_state_dict(states, own)
        step = int((own or states[0])["step"])
        self._first_step += step - self._steps  # what was counted before stays counted
        self._steps = step

    def close(self) -> None:
        """End its exchanges, after those that are in flight."""
        self._reminder.stop()
        self.policy.close()

    def _check_open(self) -> None:
        if self.policy.closed:
            raise StateError("this follower is closed; step and average before close()")


def policy_for(
    model: nn.Module, optimizer: Optimizers, scheme: OuterScheme | GossipScheme, end: Any, **options: Any
) -> Policy:
    """The policy of a scheme at this end of the network; outer rounds take the options of `OuterRounds`."""
    if scheme.of_what == "drift":
        return OuterRounds(model, optimizer, scheme, end, **options)
    return _GOSSIP[scheme.exchange.mode](model, optimizer, scheme, end)


def consensus(follower: Follower) -> tuple[Tensor, float]:
    """(the mean of all models as one vector, this one's distance to it over its norm); a call that all workers make.

    It serves measuring: nothing of it is counted.
    """
    follower._check_open()
    mean = follower.policy.measured_mean(follower._steps)
    distance = (follower.vector.read().to(mean.device) - mean).double().norm() / mean.double().norm()
    return mean, float(distance)


def gather(follower: Follower, values: Sequence[float]) -> list[list[float]]:
    """The same numbers of all workers that are there, in rank order; a call that all of those make."""
    return follower.policy.gather(values)


def server_stats(follower: Follower) -> list[dict[str, Any]]:
    """What each dedicated server counted so far, if there are any; a call that all workers make."""
    return follower.policy.server_stats()
