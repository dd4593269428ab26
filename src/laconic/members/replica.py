"""A member's half of elastic outer steps as a state machine: its model, what it owes, and what the server told it."""

from __future__ import annotations

import logging
import math
import operator
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from laconic import kernels
from laconic.errors import FrameError, PeerError, SchemeError, StateError
from laconic.layout import Layout
from laconic.members.codec import VectorCodec, codec_for, exact_codec
from laconic.members.masks import Masks, SumGrid, masked_codes
from laconic.members.messages import (
    MOST_TOKENS,
    NOTHING,
    Anchor,
    Bequest,
    Call,
    Codes,
    Drift,
    Keys,
    Leave,
    Request,
    Roster,
    Status,
    Update,
    Word,
)
from laconic.replicas import ModelVector, Part, divided
from laconic.scheme import OuterScheme

_LOG = logging.getLogger("laconic.members")
_SAVED = ("version", "counted", "anchor", "residual", "next_step", "tokens", "steps", "last_tokens")  # of a piece


@dataclass
class SentDrift:
    """A drift of which it is not known yet whether it was counted."""

    number: int
    model: Tensor  # as it was
    residual: Tensor  # as it was before
    tokens: int
    steps: int
    due: int  # in lockstep: the step after which its result is applied
    is_encoded: bool  # under masks: whether a roster has come, so that the residual is what its codes leave behind


class Piece:
    """A fragment of a member's model, or its buffers: anchor, residual, and what was sent.

    The books: all drift since the last counted one, plus the residual, is in the next drift or stays in the residual.
    """

    def __init__(self, vector: ModelVector, part: Part, number: int, codec: VectorCodec, fade: float) -> None:
        self.number = number
        self.part = part
        self.version = -1  # it has no anchor yet
        self.counted = -1  # the number of the last drift that was counted
        self.anchor = torch.zeros(part.num_entries, device=vector.device)
        self.residual = torch.zeros_like(self.anchor)
        self.sent: SentDrift | None = None
        self.question = 0  # the last one that it asked
        self.is_asking = False  # and sends no drift until it knows what became of the last one
        self.next_step = 0  # after which it is sent; a call may want it before
        self.tokens = 0  # that this member trained on since its last counted drift was sent
        self.steps = 0
        self.last_tokens = 1  # of the last drift: the weight of what is left behind
        self.codec = codec
        self._fade = fade
        self._vector = vector

    def read(self) -> Tensor:
        """The model as it is, in float32."""
        return self._vector.read(self.part, out=torch.empty_like(self.anchor))

    def request(self, *, withdraws: bool = False) -> Request:
        """The question what is new, and what became of the last drift, which may be taken back."""
        self.is_asking = True
        self.question += 1
        pending = -1 if self.sent is None or withdraws else self.sent.number
        return Request(self.number, self.version, pending, self.question)

    def drift(self, key: tuple[int, ...], due: int, report: Mapping[str, float], *, masked: bool) -> Drift | None:
        """What is to be sent, masked without a payload; None where the model is not finite and goes to the anchor."""
        now = self.read()
        sent = SentDrift(secrets.randbits(53), now, self.residual, self.tokens, self.steps, due, not masked)
        owed = self._owed_in(sent)
        if not kernels.all_finite(owed):
            _LOG.warning("fragment %d of this member's model is not finite; it goes back to the anchor", self.number)
            self._vector.write_(self.anchor, self.part)
            return None
        self.sent, payload, norm = sent, NOTHING, 0.0
        if not masked:
            payload, moved = self.codec.encode(owed, key)
            self.residual = owed - moved
            norm = float(self.residual.norm())
        tokens = max(1, self.tokens)
        return Drift(self.number, self.version, sent.number, tokens, self.steps, norm, dict(report), payload)

    def _owed_in(self, sent: SentDrift) -> Tensor:
        drift = self._vector.rounded(self.anchor, self.part) - sent.model
        return drift.add_(sent.residual, alpha=self._fade)

    def codes(self, roster: Roster, masks: Masks, keys: Iterable[str]) -> Codes:
        """The drift that was announced, for the sum of a roster; the same codes however often it asks."""
        assert self.sent is not None
        grid = SumGrid.read(masks.bits, roster.payload, self.part.num_entries)
        owed = self._owed_in(self.sent)
        payload, moved = masked_codes(grid, masks, owed, max(1, self.sent.tokens), roster, keys)
        self.residual = owed - moved
        self.sent.is_encoded = True
        return Codes(self.number, roster.digest().hex(), payload)

    @property
    def owes(self) -> bool:
        """Whether some of its training is not known to be in a sum."""
        return self.is_asking or self.sent is not None or self.tokens > 0

    def settle_(self, anchor: Tensor, *, is_counted: bool) -> None:
        """Move the model with its anchor; a drift that was counted is in the anchor now, another one stays."""
        if is_counted and self.sent is not None:
            self._vector.add_(anchor - self.sent.model, self.part)
            self.tokens -= self.sent.tokens
            self.steps -= self.sent.steps
            self.last_tokens = max(1, self.sent.tokens)
            self.counted = self.sent.number
        else:
            self._vector.add_(anchor - self.anchor, self.part)
            if self.sent is not None:
                self.residual = self.sent.residual
        self.sent = None
        self.anchor = anchor

    def begin_at_(self, anchor: Tensor) -> None:
        """Take the model to an anchor, with no drift."""
        self._vector.write_(anchor, self.part)
        self.anchor = anchor
        self.residual.zero_()
        self.sent = None
        self.tokens = self.steps = 0
        self.last_tokens = 1

    def owed(self) -> Tensor:
        """The drift and the residual that were not sent."""
        since = self._vector.rounded(self.anchor, self.part) if self.sent is None else self.sent.model
        return (since - self.read()).add_(self.residual)

    def uncounted(self) -> Tensor:
        """All that it does not know to be counted: its drift and its residual, as if nothing had been sent."""
        residual = self.residual if self.sent is None else self.sent.residual
        return self._vector.rounded(self.anchor, self.part) - self.read() + residual

    def bequest(self) -> Bequest:
        """All that was not counted."""
        return Bequest(self.number, max(self.tokens, self.last_tokens), self.owed().cpu().view(torch.uint8))

    def state_dict(self) -> dict[str, Any]:
        """All but the model itself, as copies on the CPU."""
        sent = None if self.sent is None else {name: _copied(value) for name, value in vars(self.sent).items()}
        return {"sent": sent, **{name: _copied(getattr(self, name)) for name in _SAVED}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what was saved, on a model as it was then."""
        for name in _SAVED:
            setattr(self, name, _copied(state[name], self._vector.device))
        sent = state["sent"]
        sent = sent and SentDrift(**{name: _copied(value, self._vector.device) for name, value in sent.items()})
        self.sent = sent or None
        self.is_asking = True  # drifts may have been counted since


class Replica:
    """A model that trains apart under a server's scheme; methods return the messages that are to leave.

    Args:
        model: The bare model.
        scheme: The server's.
        generation: Drawn by each process.
        seed: Names this member's draws: two members must not round alike.
        share: (i, n): every n-th fragment from i on alone, which one of n servers keeps.
        masks: What hides its drifts from the server, where that adds up masked codes.

    Raises:
        SchemeError: There is no such fragment.
    """

    def __init__(
        self,
        model: nn.Module,
        scheme: OuterScheme,
        generation: int,
        seed: int = 0,
        share: tuple[int, int] = (0, 1),
        masks: Masks | None = None,
    ) -> None:
        self.scheme = scheme
        self.masks = masks
        self._keys: dict[str, str] = {}  # of all who are there, by process
        self.vector = ModelVector(model, only_trained=True)
        self.progress = Status("", -1, is_founded=False, tokens=0, rounds=0, num_members=0, is_lockstep=False)
        self.num_steps = 0
        self.num_healed = 0  # fragments that went back to the anchor, since they were not finite
        self.num_counted = 0
        self.num_late = 0  # drifts that came after their round was closed, and went again
        self.generation = generation
        self.has_left = False  # the server has all that this member owed
        self._is_leaving = self._is_handed_over = False
        self._seed = seed
        self._called: set[tuple[int, int]] = set()
        fade = scheme.exchanged.memory.fade
        self.pieces: dict[int, Piece] = {}
        parts = parts_of(self.vector, scheme)
        index, num_shares = share
        if num_shares > len(parts):
            raise SchemeError(
                f"{num_shares} servers cannot share {len(parts)} fragments; give fewer, or more fragments"
            )
        for number in list(parts)[index::num_shares]:
            part = parts[number]
            layout = self.vector.layout_of(part)
            is_buffers = number == scheme.when.fragments
            codec = exact_codec(layout) if is_buffers else codec_for(scheme.exchanged, layout)
            self.pieces[number] = Piece(self.vector, part, number, codec, fade)

    @property
    def layouts(self) -> dict[int, Layout]:
        """Those of all fragments, by number."""
        return {number: self.vector.layout_of(piece.part) for number, piece in self.pieces.items()}

    @property
    def is_ready(self) -> bool:
        """Whether every anchor has come."""
        return all(piece.version >= 0 for piece in self.pieces.values())

    def on_word(self, word: Word) -> list[Word]:
        """Do what a message of the server says."""
        if isinstance(word, Status):
            self._is_handed_over = False  # it is back, and asks what has come
            return self._on_status(word)
        if isinstance(word, Leave):
            if not self._is_leaving:
                raise PeerError("this member has left, and handed over what its state holds; join without that state")
            self.has_left = True
        elif self._is_handed_over:
            pass
        elif isinstance(word, Anchor):
            self._on_anchor(self._piece(word.fragment), word)
            return self._last_words() if self._is_leaving else []
        elif isinstance(word, Update):
            words = self._on_update(self._piece(word.fragment), word)
            return [*words, *self._last_words()] if self._is_leaving and self.masks else words
        elif isinstance(word, Keys):
            if not all(isinstance(key, str) for key in word.keys.values()):
                raise FrameError("sent keys that are none")
            known = {} if word.is_all else self._keys
            self._keys = {process: key for process, key in {**known, **word.keys}.items() if key}
            return self._last_words() if self._is_leaving else []
        elif isinstance(word, Roster):
            return self._on_roster(self._piece(word.fragment), word)
        elif isinstance(word, Call):
            self._called.add((word.fragment, word.version))
        return []

    def _piece(self, number: int) -> Piece:
        if number not in self.pieces:
            raise FrameError(f"sent fragment {number}, of {len(self.pieces)}")
        return self.pieces[number]

    def _on_status(self, status: Status) -> list[Word]:
        if self.progress.is_founded and status.run != self.progress.run:
            raise PeerError("the server has begun another run, without its state; end this member, and join anew")
        if not status.is_founded and self.pieces and any(piece.version >= 0 for piece in self.pieces.values()):
            raise PeerError("the server asks for this member's model amid a run, which would show its drift; leave it")
        self.progress = status
        founds = status.founder == self.generation
        if not status.is_founded:
            return [Anchor.of(number, 0, piece.read()) for number, piece in self.pieces.items() if founds]
        for piece in self.pieces.values():
            if founds and piece.version < 0:
                self._begin_(piece, piece.read(), 0)
        return self.requests()

    def requests(self) -> list[Word]:
        """Ask for what is new of every fragment, and what became of its last drift."""
        return [piece.request(withdraws=self._is_leaving and not self.masks) for piece in self.pieces.values()]

    def leave(self) -> list[Word]:
        """Begin to hand over what this member owes; `has_left` says when the server has it, whatever fails meanwhile.

        Drifts that no round has counted are taken back: a server that dies keeps what it inherited, and no open round.
        Under masks they are in a last sum instead; what its grid cannot hold ends with this member.
        """
        self._is_leaving = True
        return self._last_words() if self.masks else self.requests()

    def _on_anchor(self, piece: Piece, word: Anchor) -> None:
        if word.question != piece.question:  # the answer to a later question is on its way, and says what holds then
            return
        anchor = piece.anchor
        if word.payload.numel():
            anchor = word.values().to(piece.anchor.device)
            if anchor.numel() != piece.anchor.numel():
                raise FrameError(f"sent an anchor of {anchor.numel()} entries, not {piece.anchor.numel()}")
        sent = piece.sent
        is_known = word.counted == piece.counted or (
            sent is not None and word.counted == sent.number and sent.is_encoded
        )
        if piece.version < 0:
            self._begin_(piece, anchor, word.version)
        elif not is_known:  # this process was restored from a state that holds what was counted meanwhile
            lost = float(piece.owed().norm())
            _LOG.warning(
                "fragment %d continues from the anchor: drifts were counted or handed over after this state was saved; "
                "a drift and residual of norm %.3g, part of which came, are dropped",
                piece.number,
                lost,
            )
            self._begin_(piece, anchor, word.version)
            piece.counted = max(-1, word.counted)
        elif piece.sent is None or not word.is_held or word.payload.numel():
            is_counted = piece.sent is not None and piece.sent.number == word.counted
            self._count(piece, is_counted=is_counted)
            piece.settle_(anchor, is_counted=is_counted)
        piece.version = word.version
        piece.is_asking = False

    def _on_roster(self, piece: Piece, roster: Roster) -> list[Word]:
        if self.masks is None:
            raise FrameError("asks for masked codes, of a member without masks")
        own = next((process for process, key in self._keys.items() if key == self.masks.public), "")
        is_asked = piece.sent is not None and roster.numbers.get(own) == piece.sent.number
        if not is_asked or roster.version != piece.version:  # of a process that was restored since
            return []
        return [piece.codes(roster, self.masks, (self._keys.get(process, "") for process in roster.numbers))]

    def _begin_(self, piece: Piece, anchor: Tensor, version: int) -> None:
        piece.begin_at_(anchor)
        piece.version = version
        piece.next_step = self.num_steps + self._interval(piece.number, min(version, self.scheme.when.warmup))

    def _on_update(self, piece: Piece, word: Update) -> list[Word]:
        if word.version != piece.version + 1:  # sent before the anchor that has come since, or after one was missed
            return [] if word.version <= piece.version else [piece.request()]
        moved = piece.codec.decode(word.payload, piece.anchor.device)
        self._count(piece, is_counted=word.is_counted)
        piece.settle_(piece.anchor + moved, is_counted=word.is_counted)
        piece.version = word.version
        self._called.discard((piece.number, word.version - 1))
        self.progress = replace(self.progress, tokens=word.tokens, rounds=word.rounds, num_members=word.num_members)
        return []

    def _count(self, piece: Piece, *, is_counted: bool) -> None:
        if piece.sent is not None:
            self.num_counted += is_counted
            self.num_late += not is_counted

    def after_step(self, tokens: int = 1, report: Mapping[str, float] | None = None) -> list[Word]:
        """Count a step of training, and send the drifts that are due or called for."""
        tokens = checked_tokens(tokens)
        self.num_steps += 1
        words: list[Word] = []
        for number, piece in self.pieces.items():
            piece.tokens += tokens
            piece.steps += 1
            is_due = self.num_steps >= piece.next_step or (number, piece.version) in self._called
            if piece.version < 0 or piece.is_asking or piece.sent or not is_due:
                continue
            when = self.scheme.when
            delay = when.delay if piece.version >= when.warmup else 0
            drift = self._drift(piece, delay, report or {})
            # Counted from this round, so that members who joined at other times go on together.
            piece.next_step = self.num_steps + self._interval(number, piece.version + 1)
            if drift:
                words += drift
                self._called.discard((number, piece.version))
        return words

    def _drift(self, piece: Piece, delay: int, report: Mapping[str, float]) -> list[Word]:
        key = self._seed, piece.number, self.num_steps
        drift = piece.drift(key, self.num_steps + delay, report, masked=self.masks is not None)
        self.num_healed += drift is None
        return [] if drift is None else [drift]

    def _interval(self, number: int, version: int) -> int:
        """Steps until a fragment of this version is sent, after it was sent in the one before."""
        when = self.scheme.when
        if version < when.warmup:
            return 1
        place = min(number + 1, when.fragments)  # buffers go with the last fragment
        return when.every if version > when.warmup else place * when.every // when.fragments

    def awaited(self) -> list[Piece]:
        """In lockstep: the fragments whose result is due and has not been applied."""
        return [piece for piece in self.pieces.values() if piece.sent and piece.sent.due <= self.num_steps]

    def _last_words(self) -> list[Word]:
        """What a member that leaves hands over, once it was told what became of all of its drifts."""
        if self.masks is not None:
            return self._last_drifts()
        if any(piece.is_asking for piece in self.pieces.values()):
            return []
        self._is_handed_over = True
        return [*(piece.bequest() for piece in self.pieces.values()), Leave()]

    def _last_drifts(self) -> list[Word]:
        """Under masks: what is left for a last sum, or that all is in one; who is alone is in none."""
        pieces = self.pieces.values()
        owes = any(piece.owes for piece in pieces)
        is_alone = len(self._keys) < 2
        if is_alone and (sent := [piece for piece in pieces if piece.sent is not None]):
            return [piece.request(withdraws=True) for piece in sent if not piece.is_asking]
        if not owes or (is_alone and not any(piece.is_asking for piece in pieces)):
            lost = float(torch.cat([piece.owed() for piece in pieces]).norm())
            _LOG.log(logging.WARNING if owes else logging.INFO, "drifts of norm %.3g that no sum took end here", lost)
            self._is_handed_over = True
            return [Leave()]
        settled = [piece for piece in pieces if piece.owes and piece.sent is None and not piece.is_asking]
        return [drift for piece in settled for drift in self._drift(piece, 0, {})]

    @property
    def uncounted_norm(self) -> float:
        """Of what would be lost with it, if the server has none of what it sent last."""
        return math.hypot(*(float(piece.uncounted().norm()) for piece in self.pieces.values() if piece.version >= 0))

    def state_dict(self) -> dict[str, Any]:
        """What a process needs that is to continue as this one, beside the model."""
        return {
            "generation": self.generation,
            "run": self.progress.run,
            "scheme": str(self.scheme),
            "steps": self.num_steps,
            "counted": self.num_counted,
            "late": self.num_late,
            "pieces": {number: piece.state_dict() for number, piece in self.pieces.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the process that saved this, on a model as it was then.

        Raises:
            StateError: It is of another scheme or model.
        """
        shapes = {number: piece.anchor.shape for number, piece in self.pieces.items()}
        try:
            pieces = {int(number): piece for number, piece in state["pieces"].items()}
            saved_shapes = {number: piece["anchor"].shape for number, piece in pieces.items()}
            saved_scheme = str(state["scheme"])
        except (KeyError, TypeError, AttributeError):
            raise StateError("this is no state of a member; give what member.state_dict() returned") from None
        if saved_scheme != str(self.scheme) or saved_shapes != shapes:
            raise StateError(
                f"the state is of a member under {saved_scheme} with fragments {saved_shapes}; this server runs "
                f"{self.scheme} with {shapes}: join without a state"
            )
        self.generation, self.num_steps = int(state["generation"]), int(state["steps"])
        self.num_counted, self.num_late = int(state["counted"]), int(state["late"])
        self.progress = replace(self.progress, run=str(state["run"]), is_founded=True)
        self._called.clear()
        for number, piece in self.pieces.items():
            piece.load_state_dict(pieces[number])

    def stats(self) -> dict[str, Any]:
        """What a member's account says of its rounds."""
        norms = [float(piece.residual.norm()) for piece in self.pieces.values()]
        return {
            "steps": self.num_steps,
            "rounds": self.num_counted,
            "late_rounds": self.num_late,
            "residual_norm": sum(norm * norm for norm in norms) ** 0.5,
            "versions": {number: piece.version for number, piece in self.pieces.items()},
        }


def _copied(value: Any, device: torch.device | str = "cpu") -> Any:
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


def checked_tokens(tokens: int) -> int:
    """The tokens of a step as an int; SchemeError where they are no count."""
    try:
        count = operator.index(tokens)
    except TypeError:
        count = -1
    if not 0 <= count <= MOST_TOKENS:
        raise SchemeError(f"a step has tokens={tokens}; give a whole number, 0 or more")
    return count


def parts_of(vector: ModelVector, scheme: OuterScheme) -> dict[int, Part]:
    """A model's fragments under a scheme by number, and behind them its buffers, if it has any."""
    parts = {}
    for number, spans in enumerate(divided(vector.parameter_spans, scheme.when.fragments)):
        if spans:
            parts[number] = Part(spans[0].start, spans[-1].stop, spans[-1].stop - spans[0].start)
    if vector.buffers.num_entries:
        parts[scheme.when.fragments] = vector.buffers
    return parts


def check_elastic(scheme: Any) -> OuterScheme:
    """The scheme, if members can come and go under it."""
    if getattr(scheme, "of_what", "") != "drift" or scheme.exchange.in_pairs or scheme.then.pulls:
        raise SchemeError(f"{scheme} has no outer steps that a server takes; use one like streaming or sparseloco")
    if scheme.when.mix is not None:
        raise SchemeError("members keep what they learned meanwhile; leave mix out")
    codec_for(scheme.exchanged, Layout.of(["model"], [64]))
    outer_scheme: OuterScheme = scheme
    return outer_scheme
