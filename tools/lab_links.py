"""What the links of a lab are really like: rate and loss by UDP, delay by echo, and what TCP makes of it.

    python tools/lab_links.py --hosts 4 --link 50mbit --delay 20ms --loss 0.5%

One JSON object is printed. Its path is also the program that the hosts run for it, on the standard library alone.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic_lab.network.host import Host
    from laconic_lab.network.lab import Lab

_PACKETS = 100_000
_HEADERS = 14 + 20 + 8  # Ethernet, IP and UDP, around a payload that fills the MTU
_PAYLOAD = 1514 - _HEADERS
_PORT = 5001
_ECHOES = 40
_SILENCE_S = 1.0  # after which an echo is lost
_END, _ENDS = b"end", 20
_STREAM_S = 8.0


def measure(lab: Lab, packets: int = _PACKETS, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The link between the first two hosts beside what was asked of it, and TCP from every host to the next at once."""
    link = lab.hosts[0].link
    sender, receiver = lab.hosts[0], lab.hosts[1]
    say(f"{_ECHOES} echoes")
    (round_trips,) = between([(sender, receiver)], "echo", "ping", _ECHOES)
    flood_s = packets * (_PAYLOAD + _HEADERS) * 8 / (link.bits_per_s or 10**9)
    say(f"{packets:,} packets of UDP, about {flood_s:.0f} s")
    (flood,) = between([(sender, receiver)], "sink", "flood", packets)
    say(f"streams of TCP, {_STREAM_S:.0f} s")
    pairs = list(zip(lab.hosts, (*lab.hosts[1:], sender), strict=True))
    streams = between(pairs, "drink", "pour", _STREAM_S)
    return {
        "link": str(link),
        "hosts": len(lab.hosts),
        "mbit by UDP": round(8e-6 * flood["bytes"] / flood["seconds"], 2),
        "ms one way by echo": round(500 * statistics.median(round_trips["seconds"]), 2),
        "% lost by UDP": round(100 * (1 - flood["packets"] / packets), 4),
        "packets": packets,
        "mbit of each host by TCP, all at once": round(
            statistics.mean(8e-6 * each["bytes"] / each["seconds"] for each in streams), 2
        ),
    }


def between(pairs: list[tuple[Host, Host]], server: str, client: str, size: float) -> list[dict[str, Any]]:
    """The measurements of one side: the client of an echo, and else the server."""

    def start(host: Host, *words: str) -> subprocess.Popen[str]:
        return host.popen([sys.executable, "-I", "-S", __file__, *words], stdout=subprocess.PIPE)

    servers = [start(receiver, server) for _, receiver in pairs]
    for process in servers:
        assert process.stdout is not None
        process.stdout.readline()  # it listens
    clients = [start(sender, client, receiver.address, str(size)) for sender, receiver in pairs]
    replies = [(a if client == "ping" else b).communicate()[0] for a, b in zip(clients, servers, strict=True)]
    for process in (*servers, *clients):
        process.kill()
        process.wait()
    return [json.loads(text) for text in replies]


def _echo(_: list[str]) -> None:
    with _listening() as server:
        while True:
            data, peer = server.recvfrom(64)
            server.sendto(data, peer)


def _ping(words: list[str]) -> None:
    seconds = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.settimeout(_SILENCE_S)
        peer.connect((words[0], _PORT))
        for number in range(int(float(words[1])) + 1):
            start = time.perf_counter()
            peer.send(b"?")
            try:
                peer.recv(64)
            except TimeoutError:
                continue  # one way or the other it was lost
            seconds += [time.perf_counter() - start] * (number > 0)  # the first also asked for the peer's address
    print(json.dumps({"seconds": seconds}))


def _sink(_: list[str]) -> None:
    times: list[float] = []
    packets = 0
    with _listening() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        while server.recv(2048) != _END:
            times = [times[0] if times else time.perf_counter(), time.perf_counter()]
            packets += 1
    print(json.dumps({"packets": packets, "bytes": packets * (_PAYLOAD + _HEADERS), "seconds": times[1] - times[0]}))


def _flood(words: list[str]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        # Less than the queue of a link holds, so that this waits for it, and nothing is lost there.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
        peer.connect((words[0], _PORT))
        for _ in range(int(words[1])):
            peer.send(bytes(_PAYLOAD))
        with suppress(ConnectionRefusedError):  # it has heard one of them, after all that was under way
            for _ in range(_ENDS):
                peer.send(_END)
                time.sleep(0.05)


def _drink(_: list[str]) -> None:
    with socket.create_server(("0.0.0.0", _PORT)) as server:
        print("listening", flush=True)
        stream = server.accept()[0]
    start, num_bytes = time.perf_counter(), 0
    while chunk := stream.recv(1 << 18):
        num_bytes += len(chunk)
    print(json.dumps({"bytes": num_bytes, "seconds": time.perf_counter() - start}))


def _pour(words: list[str]) -> None:
    end = time.perf_counter() + float(words[1])
    with socket.create_connection((words[0], _PORT)) as stream:
        while time.perf_counter() < end:
            stream.sendall(bytes(1 << 16))


def _listening() -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("0.0.0.0", _PORT))
    print("listening", flush=True)
    return server


_ACTIONS: dict[str, Callable[[list[str]], None]] = {
    "echo": _echo,
    "ping": _ping,
    "sink": _sink,
    "flood": _flood,
    "drink": _drink,
    "pour": _pour,
}


def main() -> None:
    """Make a lab, measure it, and print what was found."""
    import argparse

    from laconic.cli import say
    from laconic_lab.cli.lab import add_spec, spec_of
    from laconic_lab.network import Lab

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_spec(parser, "of the lab, 2 or more")
    parser.add_argument("--packets", type=int, default=_PACKETS, help="of UDP")
    args = parser.parse_args()
    with Lab.create(spec_of(args)) as lab:
        print(json.dumps(measure(lab, args.packets, lambda text: say(f"laconic: {text}"))))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in _ACTIONS:  # as a host
        _ACTIONS[sys.argv[1]](sys.argv[2:])
    else:
        main()
