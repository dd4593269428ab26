"""Hold the namespaces of a lab, or become a command on one of its hosts; see `main`.

Run by its path, and on the standard library alone: it takes 40 ms, and `import laconic`, which brings torch, seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUTS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x04000000, 0x10000000, 0x40000000
_MS_BIND, _MS_RDONLY, _MS_REC, _MS_SLAVE = 1 << 12, 1, 1 << 14, 1 << 19
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")  # TCP's, in the namespace that one is in
_FIRST_FILE = 100  # of the files by which a holder keeps its namespaces
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


def namespace(holder: int, index: int) -> str:
    """The path of network namespace `index` of the process that holds it."""
    return f"/proc/{holder}/fd/{_FIRST_FILE + index}"


def join(path: str) -> None:
    """Move this process, of one thread, into a network namespace, and into the user namespace that owns it.

    An ordinary user has every capability in the namespaces that another process of theirs has made, until exec.
    """
    user = f"{path.partition('/fd/')[0]}/ns/user"
    kinds = {path: CLONE_NEWNET}
    if not os.path.samefile(user, "/proc/self/ns/user"):
        kinds = {user: CLONE_NEWUSER, **kinds}
    files = [(os.open(each, os.O_RDONLY | os.O_CLOEXEC), kind) for each, kind in kinds.items()]
    for file, kind in files:
        call("setns", file, kind)
        os.close(file)


def become_owner() -> None:
    """Move this process, of one thread, into a user namespace of its own, where it is who it was, and may do all."""
    user, group = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")  # or the kernel takes no map of groups from an ordinary user
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def hold(count: int) -> None:
    """Make network namespaces, print the number of the process that holds them, and let it stay once told `go`.

    TCP is alike in all labs, whatever the machine's own is set to.
    """
    for index in range(count):
        call("unshare", CLONE_NEWNET)
        with suppress(OSError):  # a kernel that has another one alone: who made the lab says so
            CONGESTION_CONTROL.write_text("cubic")
        made = os.open("/proc/self/ns/net", os.O_RDONLY)
        os.dup2(made, _FIRST_FILE + index)
        os.close(made)
    if pid := os.fork():  # so that the holder is nobody's child, and the lab may outlive who made it
        print(pid, CONGESTION_CONTROL.read_text().strip(), flush=True)
        return
    os.setsid()
    if os.read(0, 2) != b"go":  # who made it was killed before it wrote the lab down
        return
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    while True:
        signal.pause()


def settle(name: str, hosts_file: str) -> None:
    """Give this process the host's name, and let it resolve; both end with it, so nothing is left in /etc.

    As on a machine of its own: torchrun's c10d rendezvous finds its server by its name, and TCPStore warns about
    peers without one.
    """
    call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
    call("sethostname", name.encode(), len(name.encode()))
    mount("none", "/", "none", _MS_SLAVE | _MS_REC)  # what is mounted from here on is seen here alone
    mount(hosts_file, "/etc/hosts", "none", _MS_BIND)
    # NCCL reads the speed of an interface there; where it cannot be mounted, that of the machine's own is as good.
    with suppress(OSError):
        mount("sysfs", "/sys", "sysfs", _MS_RDONLY & os.statvfs("/sys").f_flag)


def run(namespace: str, name: str, hosts_file: str, *argv: str) -> None:
    """Enter a host and become the command."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the command would inherit that
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        join(namespace)
        settle(name, hosts_file)
    except OSError as error:
        sys.exit(f"laconic: {name} of the lab could not be entered ({error.filename}: {error.strerror}); make it again")
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"laconic: {argv[0]} cannot be run on {name}: {error.strerror}", file=sys.stderr)
        sys.exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


def main() -> None:
    """Do as told: python -I -S enter.py (hold | own) COUNT, or run NAMESPACE NAME HOSTS_FILE COMMAND..."""
    action, *words = sys.argv[1:]
    if action == "run":
        run(*words)
        return
    if action == "own":
        become_owner()
    hold(int(words[0]))


if __name__ == "__main__":
    main()
