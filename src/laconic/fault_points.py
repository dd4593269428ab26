"""Named places in a running worker at which a test may act; `laconic.testing` is their public face.

The library calls `fault_point` there, if any is `armed`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
Handler = Callable[..., Any]

# What each means, and what its handlers are called with. Others may add theirs.
FAULT_POINTS = {
    "bucket.begin": "before a bucket is selected and encoded (bucket)",
    "bucket.encoded": "after that, before anything of it is sent (bucket)",
    "bucket.send": "before each message of a bucket (bucket)",
    "bucket.apply": "before what was received is applied (bucket)",
    "bucket.applied": "after that (bucket)",
    "gossip.step": "before a follower's step",
    "gossip.request": "before a request to a peer (peer)",
    "gossip.sent": "after the request, before its reply (peer)",
    "gossip.apply": "before a follower's model moves by what exchanges brought",
    "server.round": "before a server receives a round",
    "members.send": "before a member, or the server of members, sends a message (message)",
    "members.receive": "before it acts on one (message)",
    "connection.send": "before bytes leave; a handler returns those that are still to be sent (bytes, connection)",
}
armed: dict[str, list[Handler]] = {}  # the handlers of each place that has some


def fault_point(name: str, *about: Any) -> None:
    """Call the handlers of a place."""
    for handler in armed.get(name, ()):
        handler(*about)


def through_fault_point(name: str, value: T, *about: Any) -> T:
    """The value, or what the handlers of a place make of it."""
    for handler in armed.get(name, ()):
        value = handler(value, *about)
    return value


@contextmanager
def at_fault_point(name: str, handler: Handler) -> Iterator[None]:
    """Let `handler` be called at a place while the block runs; one that raises ends what the worker was doing.

    Args:
        name: A key of `FAULT_POINTS`, which says what the handler is called with.
        handler: Called on the thread that passes the place.

    Raises:
        ValueError: No place has this name.

    Example:
        >>> with at_fault_point("bucket.send", lambda bucket: time.sleep(1)):
        ...     loss.backward()
    """
    if name not in FAULT_POINTS:
        raise ValueError(f"no fault point is called {name!r}; give one of {', '.join(FAULT_POINTS)}")
    armed.setdefault(name, []).append(handler)
    try:
        yield
    finally:
        armed[name].remove(handler)
        if not armed[name]:
            del armed[name]
