"""Workers are processes: a torch.distributed process group of the session's own."""

import atexit
import hashlib
import json
import logging
import traceback
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import FrameError, LaunchError, PeerError, SchemeError
from laconic.kernels import to_host
from laconic.transport.mesh import Mesh, open_mesh
from laconic.transport.rendezvous import Address
from laconic.transport.tls import has_tls, is_guarded
from laconic.transport.traffic import Traffic
from laconic.transport.transport import Collectives, Push

_LOG = logging.getLogger("laconic.transport")
_CARD_BYTES = 1024  # of a rank's release, and a server's address
_FACT_BYTES = 1 << 16  # of what a rank has, where two differ
_STATE_BYTES = 1 << 40  # of one rank's
_PIECE_BYTES = 1 << 26  # of a state: what a GPU has to find room for at once
# A sum of at most so many bytes goes by two hops of the mesh instead of Gloo's ring. In a lab among 4 at 100mbit that
# takes 0.61 of the ring's time for 110 kB, 0.81 for 180 kB and 1.2 for 260 kB; at 1gbit it is sooner up to 4 MB.
_HOPS_BYTES = 3 << 16
_TLS_CURE = "use the gloo backend, or unset it and encrypt the network itself"
_HOOK_CURE = "give another scheme, or unset it and encrypt the network itself"
_TIMEOUT_S = 1800.0  # where the backend does not say how long a call waits


class Group(Collectives):
    """One process's end of a network.

    Over Gloo frames and small sums go through connections of our own (Mesh), which fill a link that Gloo's do not; only
    long and dense sums are the backend's. Messages lie on the host there, and CUDA tensors cross through pinned memory.
    Over NCCL nothing leaves the device. Where the user gave a certificate everything goes through the mesh, encrypted.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = group.rank()
        self.num_workers = self.num_shares = group.size()
        self.owned_share = self.rank
        self.traffic = Traffic()
        self._over_gloo = backend_for(group, device) == "gloo"
        self.wire = torch.device("cpu") if self._over_gloo else device
        timeout = _timeout_of(group, device)
        self._timeout_s = timeout.total_seconds() if timeout is not None else _TIMEOUT_S
        self._world_ranks = dist.get_process_group_ranks(group)
        self._group = group
        self._encrypts = has_tls()
        if self._encrypts and not self._over_gloo:
            raise LaunchError(f"LACONIC_TLS_CERT is set, and {backend_for(group, device)} sends in clear; {_TLS_CURE}")
        _held.add(self)
        # Where one rank has a secret or a certificate all connect now: who cannot prove it is found before all else.
        self._is_guarded = self._over_gloo and bool(self._gather_cards(torch.tensor([is_guarded()])).any())
        if self._is_guarded:
            _ = self._mesh

    @property
    def world_ranks(self) -> Sequence[int]:
        return self._world_ranks

    @cached_property
    def _mesh(self) -> Mesh | None:
        """The connections that carry frames and small sums; opened with the first of them, by all workers."""
        if not self._over_gloo:
            return None
        try:
            mesh = open_mesh(self.rank, self._world_ranks, self._gather_cards, self._timeout_s)
        except LaunchError as error:
            if self._is_guarded:  # what was to be proved, or hidden, is not sent in clear instead
                self.let_go()
                raise
            if self.rank == 0:
                _LOG.warning("frames go through Gloo, which fills less of the link: %s", error)
            return None
        self._close_mesh = weakref.finalize(self, mesh.close)  # also where nobody lets go of it
        self._close_mesh.atexit = False  # `_let_go` knows when
        return mesh

    def all_reduce_(self, tensor: Tensor, kind: str) -> None:
        is_short = 0 < tensor.nbytes <= _HOPS_BYTES
        self._add_up_(tensor, kind, self._mesh if is_short or self._encrypts else None)

    def sum_gradients_(self, tensor: Tensor, kind: str) -> None:
        self._add_up_(tensor, kind, self._mesh if self._encrypts else None)

    def _add_up_(self, tensor: Tensor, kind: str, mesh: Mesh | None) -> None:
        """Sum by the mesh, or else by the backend."""
        self.traffic.count_all_reduce(kind, tensor.nbytes, self.num_workers)
        total = self._on_wire(tensor)
        if mesh is not None:
            if total.numel():
                mesh.all_reduce_(total.view(-1))
        else:
            with self._naming_lost_peers():
                dist.all_reduce(total, group=self._group)
        if total is not tensor:
            tensor.copy_(total)

    def all_gather(self, frame: Tensor, kind: str) -> Tensor:
        self.traffic.count_all_gather(kind, frame.nbytes, self.num_workers)
        own = self._on_wire(frame)
        if self._mesh is None:
            return self._gathered(own).to(frame.device)
        everyone = _room_for((self.num_workers, own.numel()), own)
        self._mesh.all_gather(own, everyone)
        return everyone.to(frame.device)

    def all_to_all(self, rows: Tensor, kind: str) -> Tensor:
        self.traffic.count_all_to_all(kind, rows.nbytes, self.num_workers)
        outgoing = self._on_wire(rows)
        incoming = _room_for(outgoing.shape, outgoing)
        if self._mesh is None:
            with self._naming_lost_peers():
                dist.all_to_all_single(incoming, outgoing, group=self._group)
        else:
            self._mesh.all_to_all(outgoing, incoming)
        return incoming.to(rows.device)

    def push(self, push: Push) -> dict[int, Tensor]:
        received = self._all_to_all_v(push.parts, [push.longest[self.rank]] * self.num_workers)
        self.traffic.count_push(self.rank, *([part.numel() for part in parts] for parts in (push.parts, received)))
        return dict(enumerate(received))

    def pull(self, push: Push, own: Tensor | None) -> list[Tensor]:
        assert own is not None
        answers = self._all_to_all_v([own] * self.num_workers, push.longest)
        self.traffic.count_pull(self.rank, [answer.numel() for answer in answers])
        return answers

    def _all_to_all_v(self, messages: Sequence[Tensor], longest: Sequence[int]) -> list[Tensor]:
        """Send message r to worker r; returns those for this one, by rank, each of up to longest[r] bytes.

        A collective receives into room of its own length, so the lengths go first, in one hop.
        """
        if self._mesh is not None:
            return self._mesh.all_to_all_v(messages, longest)
        sent = [message.numel() for message in messages]
        with self._naming_lost_peers():
            lengths = torch.empty(len(sent), dtype=torch.int64, device=self.wire)
            dist.all_to_all_single(lengths, torch.tensor(sent, device=self.wire), group=self._group)
            received: list[int] = lengths.tolist()
            for rank, (length, most) in enumerate(zip(received, longest, strict=True)):
                _check_length(self._world_ranks[rank], length, most)
            outgoing = torch.cat(list(messages))
            incoming = outgoing.new_empty(sum(received))
            dist.all_to_all_single(incoming, outgoing, received, sent, group=self._group)
        # A message may begin anywhere, its words may not.
        return [message.clone() for message in torch.split(incoming, received)]

    def shut_down(self) -> None:
        if self._mesh is not None:
            self._mesh.shut_down()

    def broadcast(self, frame: Tensor | None, speaker: int, longest: int) -> Tensor:
        sends = self.rank == speaker
        own = self._on_wire(frame) if sends and frame is not None else torch.empty(0, dtype=torch.uint8)
        if self._mesh is not None:
            received = self._mesh.broadcast(own, speaker, longest)
        else:
            length = torch.tensor([own.numel()], device=self.wire)
            with self._naming_lost_peers():
                dist.broadcast(length, group=self._group, group_src=speaker)
                _check_length(self._world_ranks[speaker], int(length), longest)
                received = own if sends else torch.empty(int(length), dtype=torch.uint8, device=self.wire)
                if received.numel():
                    dist.broadcast(received, group=self._group, group_src=speaker)
        self.traffic.count_broadcast(received.numel(), self.num_workers, sends=sends)
        return received

    def sendrecv(self, frame: Tensor, peer: int, kind: str, num_back: int) -> Tensor:
        if peer == self.rank:
            return frame
        self.traffic.count(kind, frame.nbytes, frame.nbytes, frame.element_size() * num_back)
        own = self._on_wire(frame)
        theirs = own.new_empty(num_back)
        if self._encrypts and self._mesh is not None:
            self._mesh.sendrecv(own, theirs, peer)
            return theirs.to(frame.device)
        ops = [
            dist.P2POp(move, tensor, group=self._group, group_peer=peer)
            for move, tensor in ((dist.isend, own), (dist.irecv, theirs))
            if tensor.numel()
        ]
        with self._naming_lost_peers():
            for work in dist.batch_isend_irecv(ops) if ops else []:
                work.wait()
        return theirs.to(frame.device)

    def close(self) -> None:
        """Give the group back: its threads and sockets."""
        # A group of some ranks is named after them, and a later one would meet the old one's keys in the store.
        if hasattr(self, "_group") and spans_world(self._group):
            with suppress(ValueError):  # destroy_process_group() without arguments took it along
                dist.destroy_process_group(self._group)
        self.let_go()

    def let_go(self) -> None:
        """Hold the group no longer; with whoever holds it last, its threads end."""
        if vars(self).pop("_mesh", None) is not None:
            self._close_mesh()
        vars(self).pop("_group", None)

    def gather_small(self, card: Tensor) -> Tensor:
        if self._encrypts:
            with self.traffic.uncounted():
                return self.all_gather(card, "addresses")
        return self._gather_cards(card)

    def _gather_cards(self, card: Tensor) -> Tensor:
        return self._gathered(card.to(self.wire)).cpu()

    def _gathered(self, frame: Tensor) -> Tensor:
        """Everyone's frame, by the backend itself."""
        everyone = _room_for((self.num_workers, frame.numel()), frame)
        with self._naming_lost_peers():
            dist.all_gather(list(everyone), frame, group=self._group)
        return everyone

    def _naming_lost_peers(self) -> AbstractContextManager[None]:
        return naming_lost_peers(self._world_ranks[self.rank])

    def _on_wire(self, tensor: Tensor) -> Tensor:
        """The tensor where the backend takes it: itself, or a copy in pinned memory of the host."""
        return to_host(tensor, non_blocking=False) if self._over_gloo else tensor


class Everyone:
    """All ranks of a group between two steps: what each has goes to the first, or comes from it; not counted."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.num_ranks = group.size()
        self._group = group
        _held.add(self)

    def gather(self, own: Tensor) -> list[Tensor] | None:
        """Everyone's bytes in rank order at rank 0, None elsewhere."""
        received = self._exchange([own] + [own[:0]] * (self.num_ranks - 1))
        return received if self.rank == 0 else None

    def scatter(self, theirs: Sequence[Tensor] | None) -> Tensor | None:
        """This rank's of the bytes that rank 0 has for each; None, on all ranks, where it has none."""
        nothing = torch.empty(0, dtype=torch.uint8)
        received = self._exchange(list(theirs) if theirs and self.rank == 0 else [nothing] * self.num_ranks)
        return received[0] if received[0].numel() else None

    @cached_property
    def _end(self) -> Group:
        return Group(self._group, place_of_texts(self._group))

    def _exchange(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """Send message r to rank r; returns those for this one, by rank."""
        own = torch.tensor([message.numel() for message in messages])
        lengths = self._end.gather_small(own.view(torch.uint8)).contiguous().view(torch.int64)  # by sender and receiver
        incoming: list[int] = lengths[:, self.rank].tolist()
        for sender, length in enumerate(incoming):
            _check_length(self._end.world_ranks[sender], length, _STATE_BYTES)
        received = [torch.empty(length, dtype=torch.uint8) for length in incoming]
        for start in range(0, int(lengths.max()), _PIECE_BYTES):
            piece = slice(start, start + _PIECE_BYTES)
            outgoing = [message[piece].to(self._end.wire) for message in messages]
            rooms = [whole[piece] for whole in received]
            pieces = self._end._all_to_all_v(outgoing, [room.numel() for room in rooms])
            for sender, (room, part) in enumerate(zip(rooms, pieces, strict=True)):
                if part.numel() != room.numel():
                    _check_length(self._end.world_ranks[sender], part.numel(), -1)
                room.copy_(part)
        return received

    def let_go(self) -> None:
        """Hold the group no longer."""
        if (end := vars(self).pop("_end", None)) is not None:
            end.let_go()
        vars(self).pop("_group", None)


@contextmanager
def naming_lost_peers(rank: int) -> Iterator[None]:
    """Raise PeerError, one line, where a backend gives up in here because a peer ended or hangs."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        traceback.clear_frames(error.__traceback__)  # which hold the group, and so its connections
        why = " ".join(str(error).split())
        raise PeerError(
            f"rank {rank} cannot go on: a peer has ended, takes another number of steps, or has sent nothing for the "
            "timeout; see its log, and resume from a checkpoint, with a longer timeout_s (--server-timeout) if "
            f"need be ({why:.140})"
        ) from None


class CountedGroup(dist.ProcessGroup):
    """Passes all-reduces on to `inner` and counts each: the traffic of PyTorch's own hooks, which use nothing else."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        if has_tls():
            raise LaunchError(f"LACONIC_TLS_CERT is set, and PyTorch's own hooks send in clear; {_HOOK_CURE}")
        self.traffic = Traffic()
        self._inner = inner

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> dist.Work:  # type: ignore[override]
        for tensor in tensors:
            self.traffic.count_all_reduce("hook", tensor.nbytes, self.size())
        return self._inner.allreduce(tensors, opts)


def _room_for(shape: Sequence[int], like: Tensor) -> Tensor:
    """Room for what is received, beside another tensor; PyTorch keeps pinned memory for the next one."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, pin_memory=like.is_pinned())


def _check_length(rank: int, length: int, longest: int) -> None:
    if not 0 <= length <= longest:
        raise FrameError(f"rank {rank} is to send {length} bytes of {longest}; nothing is applied")


_held: weakref.WeakSet[Group | Everyone] = weakref.WeakSet()


@atexit.register
def _let_go() -> None:
    """End the threads of sessions' groups: one that frees a tensor while the interpreter is torn down aborts it.

    Registered before any session, it comes after those that end sessions' own threads, which may be sending.
    """
    for group in list(_held):
        group.let_go()


def own_group(like: dist.ProcessGroup, device: torch.device, timeout_s: float | None = None) -> dist.ProcessGroup:
    """A new group like another: its ranks, backend and timeout, unless one is given; a call of all of those ranks."""
    # Where it has some ranks alone, only those make this call.
    return _group_of(dist.get_process_group_ranks(like), like, device, timeout_s, is_local=not spans_world(like))


def _group_of(
    ranks: Sequence[int],
    like: dist.ProcessGroup,
    device: torch.device,
    timeout_s: float | None,
    *,
    is_local: bool = True,
) -> dist.ProcessGroup:
    with naming_lost_peers(world().rank()):
        group = dist.new_group(
            ranks=list(ranks),
            timeout=_timeout_of(like, device) if timeout_s is None else timedelta(seconds=timeout_s),
            backend=backend_for(like, device),
            use_local_synchronization=is_local,
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The time that its calls wait; None where the backend does not say."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def world() -> dist.ProcessGroup:
    """The group of all ranks."""
    if not dist.is_initialized():
        raise SchemeError("there is no process group yet; call torch.distributed.init_process_group() first")
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    return dist.group.WORLD


def counterparts(
    group: dist.ProcessGroup, within: dist.ProcessGroup, device: torch.device, timeout_s: float | None
) -> dist.ProcessGroup:
    """The ranks of `group` that stand where this one does in groups like `within`; a call that all of `group` make."""
    own = torch.tensor([*dist.get_process_group_ranks(within)[:1], within.rank(), within.size()], device=device)
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    with naming_lost_peers(world().rank()):
        dist.all_gather(everyone, own, group=group)
    places = [place.tolist() for place in everyone]
    if len({size for _, _, size in places}) > 1:
        raise SchemeError("nodes have unequal numbers of processes; give within= groups of one size")
    ranks = dist.get_process_group_ranks(group)
    alike = sorted(
        (node, rank) for (node, number, _), rank in zip(places, ranks, strict=True) if number == within.rank()
    )
    return _group_of([rank for _, rank in alike], group, device, timeout_s)


def world_without(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of all other ranks, who all make this call."""
    others = [rank for rank in range(world().size()) if rank not in ranks]
    group = dist.new_group(others, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def exchange_addresses(servers: Sequence[int], own: Address | None) -> list[Address]:
    """The address of each server; a call that all ranks make, servers with their own."""
    everyone = _texts_of_world(json.dumps([release(), own]), is_server=own is not None)
    cards = [json.loads(card) for card in everyone]
    for rank, (theirs, _) in enumerate(cards):
        if theirs != release():
            raise LaunchError(f"rank {rank} runs {theirs}, this rank {release()}; run the same on all ranks")
    addresses = [Address(*cards[server][1]) for server in servers if cards[server][1]]
    if len(addresses) < len(servers):
        raise LaunchError(f"not all of the ranks {list(servers)} serve; call laconic.serve() there, with these servers")
    return addresses


def check_connected(failure: str, *, is_server: bool) -> None:
    """LaunchError, on all ranks, where one of them tells why it could not connect; a call that all ranks make."""
    for cause in filter(None, _texts_of_world(failure, is_server=is_server)):
        raise LaunchError(cause)


def _texts_of_world(own: str, *, is_server: bool) -> list[str]:
    try:
        return texts(world(), place_of_texts(world()), own, _CARD_BYTES)
    except PeerError:
        if not is_server:
            raise
        raise LaunchError("the workers ended before they reached this server; see their logs") from None


def place_of_texts(group: dist.ProcessGroup) -> torch.device:
    """The device from which a group takes tensors that are nobody's gradients."""
    cpu = torch.device("cpu")
    return cpu if backend_for(group, cpu) == "gloo" else torch.device("cuda", torch.cuda.current_device())


def release() -> str:
    """The release, the same on all ranks: what they send each other may change from one to the next."""
    from laconic import __version__  # which imports this

    return f"laconic {__version__}"


def check_alike(group: dist.ProcessGroup, device: torch.device, facts: Sequence[str]) -> None:
    """SchemeError, on all ranks, that names who differs and in which of these; a call that all of the group make."""
    different = ranks_that_differ(group, device, "\n".join(facts))
    if not different:
        return
    theirs = texts(group, device, "\n".join(facts), _FACT_BYTES)[different[0]].split("\n")
    pairs = zip_longest(facts, theirs, fillvalue="nothing more")
    own, other = next((pair for pair in pairs if pair[0] != pair[1]), ("something", "something else"))
    rank = dist.get_process_group_ranks(group)[different[0]]
    raise SchemeError(f"rank {rank} has {other}, this rank {own}; give all ranks the same release, scheme and model")


def ranks_that_differ(group: dist.ProcessGroup, device: torch.device, text: str) -> list[int]:
    """The ranks that made this call with another text; a call that all ranks of the group make."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    everyone = texts(group, device, digest, len(digest))
    return [rank for rank, other in enumerate(everyone) if other != digest]


def values_differ(group: dist.ProcessGroup, device: torch.device, tensors: Iterable[Tensor]) -> bool:
    """Return whether some rank has other values than the rest; a call that all ranks of the group make."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return bool(ranks_that_differ(group, device, digest.hexdigest()))


def texts(group: dist.ProcessGroup, device: torch.device, own: str, num_bytes: int) -> list[str]:
    """The text of each rank of a group, of so many bytes at most."""
    padded = torch.frombuffer(bytearray(own.encode()[:num_bytes].ljust(num_bytes)), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(padded) for _ in range(group.size())]
    with naming_lost_peers(world().rank()):
        dist.all_gather(everyone, padded, group=group)
    return [other.cpu().numpy().tobytes().decode(errors="replace").rstrip() for other in everyone]


def spans_world(group: dist.ProcessGroup) -> bool:
    """Return whether all ranks are in it."""
    return dist.is_initialized() and group.size() == dist.get_world_size()


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves this device in a group: "gloo", "nccl"."""
    served = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return served.get(device.type, dist.get_backend(group))


def as_peer_error(error: BaseException, rank: int, cause: str) -> BaseException:
    """The error; as PeerError, which tells the cause, where it is how a backend tells of a peer that is gone."""
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError | OSError):
        return error
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return PeerError(f"rank {rank} cannot exchange any more: {cause} ({first_line:.200})")
