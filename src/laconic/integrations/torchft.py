"""torchft: its quorum says which replica groups take part in a round, and they exchange laconic's compressed drifts."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions

from laconic.errors import FrameError, LaconicError, PeerError, SchemeError, StateError
from laconic.members.codec import VectorCodec, codec_for, exact_codec
from laconic.members.fragment import AnchorState
from laconic.members.replica import Piece, check_elastic, checked_tokens, parts_of
from laconic.members.syncer import fingerprint_of
from laconic.outer import OuterMomentum, OuterSGD
from laconic.recipes import parse
from laconic.replicas import ModelVector, Optimizers, inner_momentum
from laconic.scheme import OuterScheme

_LOG = logging.getLogger("laconic.integrations")
# Of a process group: a peer that hung up or is late; torchft's, where it could not be configured; a damaged payload.
_FAILURES = (RuntimeError, TimeoutError, AssertionError, FrameError)


class Manager(Protocol):
    """What is asked of a torchft.Manager."""

    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any) -> None: ...
    def start_quorum(self) -> None: ...
    def errored(self) -> Any: ...
    def participating_rank(self) -> int | None: ...
    def current_step(self) -> int: ...
    def report_error(self, e: Exception) -> None: ...
    def should_commit(self) -> bool: ...
    def load_state_dict(self, state_dict: dict[str, int]) -> None: ...


class ProcessGroup(Protocol):
    """What is asked of the process group that the manager configures anew for each quorum."""

    def getBackendName(self) -> str: ...  # noqa: N802, torch's
    def size(self) -> int: ...
    def abort(self) -> None: ...
    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> Any: ...


@dataclass(frozen=True)
class ReplicaStats:
    """The account of a process of one replica group."""

    scheme: str
    steps: int  # of training, by this process
    rounds: int  # that it has committed, each of one fragment
    failed_rounds: int  # that it has not, whose drift goes again
    healed: int  # times that it took the anchors of another replica group
    num_participants: int  # replica groups in the last round
    residual_norm: float  # what rounding and selection hold back
    bytes_out: int
    bytes_in: int


class _RoundHeader(NamedTuple):
    """What a process says of itself before a round's drifts go; the latest step that most name is that of the round."""

    step: int  # torchft's; -1: it was to be healed, and was not
    lineage: int  # names the drifts that led to its anchors
    process: int
    number: int  # of its drift
    tokens: int
    steps: int
    num_bytes: int  # of its drift; 0: it sends none


@dataclass
class _Round:
    """A fragment's exchange among the replica groups of one quorum."""

    number: int
    due_step: int  # after which its result is applied
    headers: list[_RoundHeader]  # of all, in rank order
    payloads: list[Tensor]
    work: Any  # of torch.distributed


class ReplicaFollower:
    """A model that trains apart, whose drifts are exchanged among the replica groups of torchft's quorum.

    Every process keeps what a server of members would: the anchors and the outer optimizer, which are equal on all that
    have committed the same rounds. A process that has not committed one takes them from another, as torchft heals it;
    its own drift is counted once, or stays with it.
    """

    def __init__(
        self, manager: Manager, pg: ProcessGroup, model: nn.Module, optimizer: Optimizers, scheme: OuterScheme
    ) -> None:
        self.scheme = scheme
        self._manager = manager
        self._pg = pg
        self._process = secrets.randbits(63)
        self._lineage = secrets.randbits(63)
        vector = ModelVector(model, only_trained=True)
        self._pieces: dict[int, Piece] = {}
        self._anchors: dict[int, AnchorState] = {}
        self._codecs: dict[int, VectorCodec] = {}
        layouts = {number: vector.layout_of(part) for number, part in parts_of(vector, scheme).items()}
        when = scheme.when
        self._apart = when.every // len(layouts)  # steps from one round to the next
        if when.every % len(layouts) or when.delay >= self._apart:
            raise SchemeError(
                f"{scheme} has no room for one round at a time; give an `every` that is a multiple of {len(layouts)}, "
                "the fragments and the buffers, and a delay below that share of it"
            )
        momentum = inner_momentum(optimizer)
        for number, part in parts_of(vector, scheme).items():
            is_buffers = number == when.fragments
            codec = exact_codec(layouts[number]) if is_buffers else codec_for(scheme.exchanged, layouts[number])
            piece = Piece(vector, part, number, codec, scheme.exchanged.memory.fade)
            piece.begin_at_(piece.read())
            then = OuterSGD() if is_buffers else scheme.then
            outer_momentum = OuterMomentum.of(then, piece.anchor, when.every, momentum)
            self._anchors[number] = AnchorState(piece.anchor, then, outer_momentum)
            self._pieces[number], self._codecs[number] = piece, codec
        self._own = {"scheme": str(scheme), "model": fingerprint_of(layouts)}
        self._round: _Round | None = None
        self._num_steps = self._num_rounds = self._num_failed = self._num_healed = self._num_participants = 0
        self._bytes_out = self._bytes_in = 0
        manager.register_state_dict_fn("laconic", self._heal, self._healing_state)

    def step(self, tokens: int = 1) -> None:
        """Apply what is due, and begin a round that is due; call it after each optimizer step.

        Args:
            tokens: What this step trained on: the weight of this process's drift in the mean.

        Raises:
            PeerError: The other replica groups run another scheme or model.
        """
        tokens = checked_tokens(tokens)
        self._num_steps += 1
        for piece in self._pieces.values():
            piece.tokens += tokens
            piece.steps += 1
        self._apply_due_()
        if self._num_steps % self._apart == 0:
            self._begin_round()
            self._apply_due_()

    def write_anchor_(self) -> None:
        """End the round that is open, and overwrite the model by the anchors; what was learned since is dropped."""
        self.close()
        for piece in self._pieces.values():
            piece.begin_at_(piece.anchor)

    def stats(self) -> ReplicaStats:
        """What this process sent and received, and how its rounds went."""
        norms = torch.stack([piece.residual.norm() for piece in self._pieces.values()])
        return ReplicaStats(
            scheme=str(self.scheme),
            steps=self._num_steps,
            rounds=self._num_rounds,
            failed_rounds=self._num_failed,
            healed=self._num_healed,
            num_participants=self._num_participants,
            residual_norm=float(norms.norm()),
            bytes_out=self._bytes_out,
            bytes_in=self._bytes_in,
        )

    def metrics(self) -> dict[str, float]:
        """The numbers of `stats()`, for a monitor."""
        return {name: float(value) for name, value in asdict(self.stats()).items() if not isinstance(value, str)}

    def state_dict(self) -> dict[str, Any]:
        """What a process needs to continue from a checkpoint, beside model, optimizer and `manager.state_dict()`."""
        pieces = {number: piece.state_dict() for number, piece in self._pieces.items()}
        return {"process": self._process, "steps": self._num_steps, "pieces": pieces, **self._healing_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what was saved, on a model as it was then.

        Raises:
            StateError: It is of another scheme or model.
        """
        self._load_anchors(state, StateError)
        self._process, self._num_steps, self._round = int(state["process"]), int(state["steps"]), None
        for number, piece in self._pieces.items():
            piece.load_state_dict(state["pieces"][number])

    def close(self) -> None:
        """End the round that is open."""
        if self._round is not None:
            self._round.due_step = self._num_steps
        self._apply_due_()

    # A round

    def _begin_round(self) -> None:
        """Send the drift of the fragment whose turn it is to all participants of a new quorum."""
        manager = self._manager
        manager.start_quorum()  # which may heal this process
        numbers = list(self._pieces)
        number = numbers[manager.current_step() % len(numbers)]
        due_step = self._num_steps + self.scheme.when.delay
        header = _RoundHeader(-1, self._lineage, self._process, 0, 0, 0, 0)
        payload = torch.empty(0, dtype=torch.uint8)
        if manager.errored() is None:
            for other, piece in self._pieces.items():
                if piece.sent is not None:  # in a round that nobody has committed, or this process would have been told
                    piece.settle_(piece.anchor, is_counted=False)
                piece.version = self._anchors[other].version
            header = header._replace(step=manager.current_step())
            piece, rank = self._pieces[number], manager.participating_rank()
            drift = None
            if rank is not None and piece.steps:
                drift = piece.drift((rank, number, piece.version), due_step, {}, masked=False)
            if drift is not None:
                payload = drift.payload
                header = header._replace(
                    number=drift.number, tokens=drift.tokens, steps=drift.steps, num_bytes=payload.numel()
                )
        self._round = opened = _Round(number, due_step, [], [], None)
        try:
            rows, work = self._all_gather(torch.tensor(header))
            work.wait()
            opened.headers = [_RoundHeader(*row.tolist()) for row in rows]
            own = torch.zeros(max(other.num_bytes for other in opened.headers), dtype=torch.uint8)
            own[: payload.numel()] = payload
            if own.numel():
                opened.payloads, opened.work = self._all_gather(own)
        except _FAILURES as error:
            self._fail(error)

    def _all_gather(self, own: Tensor) -> tuple[list[Tensor], Any]:
        """(room for everyone's tensor in rank order, the work that fills it)."""
        everyone = [torch.zeros_like(own) for _ in range(self._pg.size())]
        work = self._pg.allgather([everyone], [own], AllgatherOptions())
        self._bytes_out += own.nbytes * (len(everyone) - 1)
        self._bytes_in += own.nbytes * (len(everyone) - 1)
        return everyone, work

    def _apply_due_(self) -> None:
        """Commit the round that is due; where this process cannot, its drift waits for what the next quorum tells."""
        if self._round is None or self._num_steps < self._round.due_step:
            return
        opened, self._round = self._round, None
        drifts: dict[str, tuple[_RoundHeader, Tensor]] = {}
        try:
            if opened.work is not None:
                opened.work.wait()
            drifts = self._drifts(opened)
        except _FAILURES as error:
            self._fail(error)
        if not self._manager.should_commit():
            self._num_failed += 1
            return
        self._num_rounds += 1
        self._num_participants = len(opened.headers)
        if drifts:
            self._commit_(opened.number, drifts)

    def _fail(self, error: Exception) -> None:
        """Give the round up, and hang up, so that who waits for this process finds out."""
        self._manager.report_error(error)
        self._pg.abort()

    def _drifts(self, opened: _Round) -> dict[str, tuple[_RoundHeader, Tensor]]:
        """The drifts of a round and what they stand for, by process; one that is not finite is left out by all.

        So are those of processes that are not where the round is. torchft compares steps alone: of two that were cut
        off from each other, and have committed as many rounds, it heals neither. So here the one that fewer are with
        goes back a step, which torchft heals. Of two that continue from one state the second has its drift left out.
        """
        places = [(header.step, header.lineage) for header in opened.headers]
        place = max(places, key=lambda place: (place[0], places.count(place)), default=None)
        if place is not None and self._manager.errored() is None and place[1] != self._lineage:
            self._manager.report_error(PeerError("this process has committed rounds that most others have not"))
            self._manager.load_state_dict({"step": max(0, place[0] - 1), "batches_committed": 0})
        codec, device = self._codecs[opened.number], self._anchors[opened.number].anchor.device
        drifts = {}
        for header, padded in zip(opened.headers, opened.payloads, strict=False):
            if not header.num_bytes or (header.step, header.lineage) != place or str(header.process) in drifts:
                continue
            values = codec.decode(padded[: header.num_bytes].clone(), device)
            if bool(values.isfinite().all()):
                drifts[str(header.process)] = header, values
            else:
                _LOG.warning("the drift of process %d is left out: it is not finite", header.process)
        return drifts

    def _commit_(self, number: int, drifts: Mapping[str, tuple[_RoundHeader, Tensor]]) -> None:
        """Take the outer step by the mean that weighs tokens, summed in one order everywhere."""
        state, piece = self._anchors[number], self._pieces[number]
        total = torch.zeros_like(piece.anchor)
        for process in sorted(drifts):
            header, values = drifts[process]
            total.add_(values, alpha=float(header.tokens))
            state.count(process, header.number, drifts)
        headers = [header for header, _ in drifts.values()]
        tokens = sum(header.tokens for header in headers)
        steps = sum(header.tokens * header.steps for header in headers) // tokens
        state.move_(total.div_(tokens), len(headers), max(1, steps // self.scheme.when.every))
        state.tokens += tokens
        self._lineage = crc32(repr((self._lineage, sorted(header.number for header in headers))).encode())
        own = drifts.get(str(self._process))
        is_counted = own is not None and piece.sent is not None and own[0].number == piece.sent.number
        if own is not None and not is_counted:
            _LOG.warning(
                "another process continues from the same state; this one is a new process, and keeps its drift"
            )
            self._process = secrets.randbits(63)
            for each in self._pieces.values():
                each.counted = -1
        piece.settle_(state.anchor, is_counted=is_counted)
        piece.version = state.version

    # Healing

    def _healing_state(self) -> dict[str, Any]:
        """What torchft sends to a process that is behind, or new."""
        anchors = {number: anchor.state_dict() for number, anchor in self._anchors.items()}
        return {**self._own, "lineage": self._lineage, "anchors": anchors}

    def _load_anchors(self, state: Mapping[str, Any], error: type[LaconicError]) -> None:
        for what, value in self._own.items():
            if state.get(what) != value:
                raise error(f"the {what} is {value} here and {state.get(what)} there; give all the same")
        self._lineage = int(state["lineage"])
        for number, anchor in self._anchors.items():
            anchor.load_state_dict(state["anchors"][number])

    def _heal(self, state: Mapping[str, Any]) -> None:
        """Continue from another process's anchors; what it counted of this one's drift is in them."""
        self._load_anchors(state, PeerError)
        self._num_healed += 1
        for number, piece in self._pieces.items():
            anchors = self._anchors[number]
            counted = anchors.last_counted(str(self._process), piece.version)
            is_counted = piece.sent is not None and counted == piece.sent.number
            if piece.version >= 0 and (is_counted or counted == piece.counted):
                piece.settle_(anchors.anchor, is_counted=is_counted)
            else:
                if piece.version >= 0:
                    _LOG.warning(
                        "fragment %d continues from the others' anchor, which has another drift of this process than "
                        "it knows of: a drift of norm %.3g is dropped",
                        number,
                        float(piece.owed().norm()),
                    )
                piece.begin_at_(anchors.anchor)
                piece.counted = max(-1, counted)
            piece.version = anchors.version


def follow(
    manager: Manager, pg: ProcessGroup, model: nn.Module, optimizer: Optimizers, scheme: OuterScheme | str
) -> ReplicaFollower:
    """Let replica groups train apart and exchange compressed drifts under torchft's manager.

    Args:
        manager: A torchft.Manager with `use_async_quorum=False`, a `quorum_timeout` of twice the process group's
            timeout or more, and no state functions of the model's own: laconic registers the anchors, from which a
            process that joins or fell behind continues.
        pg: The process group that the manager was made with: torchft's ProcessGroupGloo, since drifts leave the host.
        model: The bare model of this replica group.
        optimizer: The one that trains it; call `step()` of what is returned after each of its steps.
        scheme: Outer steps, like "streaming:every=16,fragments=4,delay=2"; a round of one fragment is one of torchft's
            steps. All replica groups give the same one.

    Returns:
        A follower: step(), stats(), metrics(), write_anchor_(), state_dict(), load_state_dict(), close().

    Raises:
        SchemeError: The scheme has no outer steps that replica groups can take, or the manager has other settings.

    Example:
        >>> follow(manager, pg, model, optimizer, "streaming:every=16,fragments=4,delay=2")  # doctest: +SKIP
    """
    outer_scheme = check_elastic(parse(scheme) if isinstance(scheme, str) else scheme)
    if getattr(manager, "_use_async_quorum", False) or not getattr(manager, "_init_sync", True):
        raise SchemeError(
            "rounds begin from equal anchors; give torchft.Manager use_async_quorum=False, init_sync=True"
        )
    hung, patience = getattr(pg, "_timeout", None), getattr(manager, "_quorum_timeout", None)
    if hung is not None and patience is not None and patience < 2 * hung:
        raise SchemeError(
            f"a round may hang for the process group's {hung.total_seconds():g} s, while others wait for a quorum; "
            f"give torchft.Manager a quorum_timeout of at least twice that, not {patience.total_seconds():g} s"
        )
    if "gloo" not in pg.getBackendName():
        raise SchemeError(f"drifts leave the host, and {pg.getBackendName()} does not; give torchft's ProcessGroupGloo")
    if outer_scheme.when.warmup:
        raise SchemeError("replica groups that join late have no warm-up; leave warmup out")
    return ReplicaFollower(manager, pg, model, optimizer, outer_scheme)
