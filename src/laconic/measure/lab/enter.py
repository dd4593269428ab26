"""Become a command on a host of a lab: python -I -S enter.py NAMESPACE NAME HOSTS_FILE COMMAND...

Run by its path, and on the standard library alone: it takes 40 ms, and `import laconic`, which brings torch, seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

NAMESPACES = "/run/netns"  # where iproute2 keeps them too, so that `ip netns exec` finds a lab's
CLONE_NEWNET, _CLONE_NEWNS, _CLONE_NEWUTS = 0x40000000, 0x00020000, 0x04000000
MS_BIND, _MS_RDONLY, _MS_REC, _MS_SLAVE = 1 << 12, 1, 1 << 14, 1 << 19
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # as a shell says it


def call(name: str, *arguments: bytes | int | ctypes.c_ulong | None) -> None:
    """Call a function of the C library that returns 0, or raise with the reason."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        words = [name, *(os.fsdecode(each) for each in arguments if isinstance(each, bytes))]
        raise OSError(number, os.strerror(number), " ".join(words))


def mount(source: str, target: str, kind: str, flags: int) -> None:
    """Call mount(2)."""
    call("mount", os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), None)


def join(namespace: str) -> None:
    """Move this thread into a network namespace."""
    file = os.open(f"{NAMESPACES}/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        call("setns", file, CLONE_NEWNET)
    finally:
        os.close(file)


def settle(name: str, hosts_file: str) -> None:
    """Give this process the host's name, and let it resolve; both end with it, so nothing is left in /etc.

    As on a machine of its own: torchrun's c10d rendezvous finds its server by its name, and TCPStore warns about
    peers without one.
    """
    call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
    call("sethostname", name.encode(), len(name.encode()))
    mount("none", "/", "none", _MS_SLAVE | _MS_REC)  # what is mounted from here on is seen here alone
    mount(hosts_file, "/etc/hosts", "none", MS_BIND)
    # NCCL reads the speed of an interface there; where it cannot be mounted, that of the machine's own is as good.
    with suppress(OSError):
        mount("sysfs", "/sys", "sysfs", _MS_RDONLY & os.statvfs("/sys").f_flag)


def main() -> None:
    """Enter, and run the command."""
    namespace, name, hosts_file, *argv = sys.argv[1:]
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the command would inherit that
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        join(namespace)
        settle(name, hosts_file)
    except OSError as error:
        sys.exit(f"laconic: {name} of the lab could not be entered ({error.filename}: {error.strerror}); run as root")
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"laconic: {argv[0]} cannot be run on {name}: {error.strerror}", file=sys.stderr)
        sys.exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


if __name__ == "__main__":
    main()
