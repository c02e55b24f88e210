"""Inside the sandbox: the judge, which holds the tests, and the worker, which holds the program.

Standard library only: :mod:`asdsim.evaluate.scorers.sandbox` hands this source to ``python -I -c``. The program runs in
the worker; the tests run in the judge and call the program's functions across a pipe. So the program sees arguments but
neither the tests nor the values they expect, and the verdict goes out on a descriptor that only the judge has.
"""

import builtins
import contextlib
import ctypes
import json
import os
import platform
import select
import signal
import struct
import subprocess
import sys
import time
from functools import partial
from typing import Any

MAX_MESSAGE = 8 << 20
"""Bytes of one answer of the program."""

START_SECONDS = 10.0
"""For the worker to start on a busy machine."""

EPERM, ENOSYS = 1, 38
CLONE_THREAD = 0x10000
SET_OWNER, SET_SIGNAL, SET_OWNER_EX = 8, 10, 15
"""Commands of ``fcntl`` that would have the kernel signal another process."""

# System calls, by machine: the architecture's audit number, clone, clone3, fcntl, and those that are refused: new
# processes and programs, sockets, signals and limits of others, memory that outlives a process, and what changes a file
# by its name, which Landlock leaves alone.
REFUSED = {
    "x86_64": (0xC000003E, 56, 435, 72, {
        "shmget": 29, "socket": 41, "connect": 42, "socketpair": 53, "fork": 57, "vfork": 58, "execve": 59, "kill": 62,
        "semget": 64, "msgget": 68, "truncate": 76, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94,
        "ptrace": 101, "setpgid": 109, "setsid": 112, "rt_sigqueueinfo": 129, "utime": 132, "setpriority": 141,
        "sched_setparam": 142, "sched_setscheduler": 144, "prctl": 157, "mount": 165, "setxattr": 188,
        "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "tkill": 200,
        "sched_setaffinity": 203, "tgkill": 234, "utimes": 235, "mq_open": 240, "add_key": 248, "keyctl": 250,
        "ioprio_set": 251, "migrate_pages": 256, "fchownat": 260, "futimesat": 261, "fchmodat": 268, "unshare": 272,
        "move_pages": 279, "utimensat": 280, "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "prlimit64": 302,
        "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "sched_setattr": 314, "bpf": 321, "execveat": 322, "userfaultfd": 323, "pidfd_send_signal": 424,
        "io_uring_setup": 425, "pidfd_open": 434, "pidfd_getfd": 438, "process_madvise": 440, "fchmodat2": 452,
        "setxattrat": 463, "removexattrat": 466,
    }),
    "aarch64": (0xC00000B7, 220, 435, 25, {
        "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
        "ioprio_set": 30, "mount": 40, "truncate": 45, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55,
        "utimensat": 88, "unshare": 97, "ptrace": 117, "sched_setparam": 118, "sched_setscheduler": 119,
        "sched_setaffinity": 122, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "setpriority": 140,
        "setpgid": 154, "setsid": 157, "prctl": 167, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194,
        "socket": 198, "socketpair": 199, "connect": 203, "add_key": 217, "keyctl": 219, "execve": 221,
        "migrate_pages": 238, "move_pages": 239, "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "prlimit64": 261,
        "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "sched_setattr": 274, "bpf": 280, "execveat": 281, "userfaultfd": 282, "pidfd_send_signal": 424,
        "io_uring_setup": 425, "pidfd_open": 434, "pidfd_getfd": 438, "process_madvise": 440, "fchmodat2": 452,
        "setxattrat": 463, "removexattrat": 466,
    }),
}  # fmt: skip

RAISED = {
    kind.__name__: kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)
}
"""Exceptions of the program that the judge raises again; every other name is a ``RuntimeError``."""


def limit(seconds: int, memory: int, folder: str) -> bool:
    """Give up what a program does not need; return whether the kernel now refuses new processes and sockets."""
    with contextlib.suppress(ImportError):
        import resource

        wanted = {"AS": memory, "DATA": memory, "CPU": seconds, "FSIZE": 4096, "CORE": 0, "NPROC": 0, "NOFILE": 64}
        for name, most in wanted.items():
            with contextlib.suppress(AttributeError, ValueError, OSError):
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    if sys.platform != "linux" or platform.machine() not in REFUSED:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: never outlive the parent
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no one looks into this process through /proc
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which the filter requires
    with contextlib.suppress(OSError):
        write_only_in(folder, libc)
    none = (ctypes.c_uint32 * 6)()
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), none)  # root keeps its files, and no privilege
    return refuse_calls(libc)


def refuse_calls(libc: Any) -> bool:
    """Install a seccomp filter: no new process (threads are fine), no exec, no socket, no signal to others."""
    arch, clone, clone3, fcntl, refused = REFUSED[platform.machine()]

    def instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, k)

    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, fail = 0x7FFF0000, 0x00050000
    program = [
        instruction(load, 4), instruction(equal, arch, 1, 0), instruction(answer, fail | EPERM),
        instruction(load, 0), instruction(at_least, 0x40000000, 0, 1), instruction(answer, fail | EPERM),
        # glibc falls back to clone, whose flags a filter can read; those of clone3 lie behind a pointer
        instruction(equal, clone3, 0, 1), instruction(answer, fail | ENOSYS),
        instruction(equal, clone, 0, 4), instruction(load, 16), instruction(any_bit, CLONE_THREAD, 1, 0),
        instruction(answer, fail | EPERM), instruction(answer, allow),
        instruction(equal, fcntl, 0, 6), instruction(load, 24), instruction(equal, SET_OWNER, 2, 0),
        instruction(equal, SET_SIGNAL, 1, 0), instruction(equal, SET_OWNER_EX, 0, 1),
        instruction(answer, fail | EPERM), instruction(answer, allow),
    ]  # fmt: skip
    for number in refused.values():
        program += [instruction(equal, number, 0, 1), instruction(answer, fail | EPERM)]
    program.append(instruction(answer, allow))
    code = ctypes.create_string_buffer(b"".join(program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    return bool(libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(head)), 0, 0) == 0)  # PR_SET_SECCOMP, filter


def write_only_in(folder: str, libc: Any) -> None:
    """Restrict writing, creating and removing files to a folder, by Landlock where the kernel has it."""
    writing = 0b1_1111_1111_0010  # of the first version: write a file, remove and make every kind of entry
    ruleset = libc.syscall(444, struct.pack("Q", writing), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return
    opened = os.open(folder, os.O_RDONLY)
    libc.syscall(445, ruleset, 1, struct.pack("=Qi", writing, opened), 0)
    devices = os.open("/dev/null", os.O_RDONLY)
    libc.syscall(445, ruleset, 1, struct.pack("=Qi", 0b10, devices), 0)
    libc.syscall(446, ruleset, 0)
    for descriptor in (opened, devices, ruleset):
        os.close(descriptor)


# --- values across the pipe -------------------------------------------------------------------------------------------


def encode(value: Any, keep: Any) -> Any:
    """Return a value as JSON can carry it; an object that is no plain value stays where it is, under a number."""
    if hasattr(value, "tolist") and getattr(value, "shape", None) == ():
        value = value.tolist()  # a scalar of numpy
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() < 4096 else {"i": hex(value)}
    if isinstance(value, float):
        return float(value)
    for tag, kind in (("l", list), ("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, kind):
            return {tag: [encode(item, keep) for item in value]}
    if isinstance(value, dict):
        return {"d": [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    return {"r": keep(value)}


def decode(value: Any, find: Any) -> Any:
    """Return what :func:`encode` was given; ``find`` turns the number of a kept object into one."""
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag in ("l", "t", "s", "z"):
        kind = {"l": list, "t": tuple, "s": set, "z": frozenset}[tag]
        return kind(decode(item, find) for item in content)
    if tag == "d":
        return {decode(key, find): decode(item, find) for key, item in content}
    if tag == "i":
        return int(content, 16)
    if tag == "b":
        return bytes.fromhex(content)
    return complex(*content) if tag == "c" else find(content)


# --- the worker: the program ------------------------------------------------------------------------------------------


def work(job: dict[str, Any], inbox: int, outbox: int) -> None:
    """Run the program, then answer calls until the judge has gone."""
    limit(job["seconds"], job["memory"], job["folder"])
    names: dict[str, Any] = {"__name__": "program", "__builtins__": builtins}
    kept: list[Any] = []
    send(outbox, "ready")

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def attempt(action: Any) -> None:
        try:
            send(outbox, {"value": encode(action(), keep)})
        except BaseException as error:
            send(outbox, {"error": type(error).__name__, "message": str(error)[:200]})

    attempt(lambda: exec(job["program"], names))
    while (message := receive(inbox, None)) is not None:
        find = kept.__getitem__
        arguments = [decode(item, find) for item in message["arguments"]]
        keywords = {key: decode(item, find) for key, item in message["keywords"].items()}
        actions = {
            "name": lambda m, a, k: names[m["of"]],
            "call": lambda m, a, k: kept[m["of"]](*a, **k),
            "list": lambda m, a, k: list(kept[m["of"]]),
            "attribute": lambda m, a, k: getattr(kept[m["of"]], m["name"]),
        }
        attempt(partial(actions[message["do"]], message, arguments, keywords))


def send(descriptor: int, message: Any) -> None:
    """Write one message."""
    body = json.dumps(message).encode()
    data = memoryview(struct.pack("<Q", len(body)) + body)
    while data:
        data = data[os.write(descriptor, data) :]


def receive(descriptor: int, until: float | None) -> Any:
    """Return one message, None at the end of the stream.

    Raises
    ------
    TimeoutError, OverflowError
        Past the time, or where a message is larger than ``MAX_MESSAGE``.
    """

    def exactly(size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            if until is not None:
                left = until - time.monotonic()
                if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                    raise TimeoutError
            piece = os.read(descriptor, min(1 << 16, size - len(parts)))
            if not piece:
                return b""
            parts += piece
        return bytes(parts)

    head = exactly(8)
    if not head:
        return None
    (size,) = struct.unpack("<Q", head)
    if size > MAX_MESSAGE:
        raise OverflowError
    body = exactly(size)
    return json.loads(body) if body else None


# --- the judge: the tests ---------------------------------------------------------------------------------------------


class Gone(Exception):
    """The program ended by itself."""


class Remote:
    """An object of the program. It equals itself only, so that no ``__eq__`` of the program can pass a test."""

    def __init__(self, call: Any, number: int) -> None:
        self._call, self._number = call, number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._call("call", self._number, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return self._call("attribute", self._number, attribute_name=name)

    def __iter__(self) -> Any:
        return iter(self._call("list", self._number))

    def __len__(self) -> int:
        return int(self.__getattr__("__len__")())

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)


class Names(dict):  # type: ignore[type-arg]
    """The tests' global names; one that they do not define is the program's."""

    def __init__(self, ask: Any) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self._ask = ask

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return self._ask("name", name)


def judge(job: dict[str, Any], source: str) -> str:
    """Run the tests against a worker; return ``passed`` or what failed."""
    to_worker, from_worker = os.pipe(), os.pipe()
    worker = subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", source, "worker", str(to_worker[0]), str(from_worker[1])],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        pass_fds=(to_worker[0], from_worker[1]), cwd=job["folder"],
    )  # fmt: skip
    os.close(to_worker[0])
    os.close(from_worker[1])
    held = limit(job["seconds"], job["memory"], job["folder"])
    if not held and hasattr(os, "geteuid") and os.geteuid() == 0:
        return "not run: as root this system cannot keep a program from starting others"
    assert worker.stdin is not None
    worker.stdin.write(json.dumps({**job, "tests": ""}).encode())  # only now, so that nothing runs beside an open judge
    worker.stdin.close()
    until = time.monotonic() + job["timeout"] + START_SECONDS

    def reply() -> Any:
        answer = receive(from_worker[0], until)
        if answer is None:
            raise Gone
        if "error" in answer:
            raise RAISED.get(answer["error"], RuntimeError)(answer["message"])
        return decode(answer["value"], lambda number: Remote(ask, number))

    def ask(do: str, of: Any, *arguments: Any, attribute_name: str = "", **keywords: Any) -> Any:
        number = Remote.__getattribute__
        positional = [encode(item, lambda remote: number(remote, "_number")) for item in arguments]
        named = {key: encode(item, lambda remote: number(remote, "_number")) for key, item in keywords.items()}
        with contextlib.suppress(BrokenPipeError):
            send(to_worker[1], {"do": do, "of": of, "name": attribute_name, "arguments": positional, "keywords": named})
        return reply()

    try:
        receive(from_worker[0], until)  # the worker has started
        until = time.monotonic() + job["timeout"]
        reply()  # the program itself
        names = Names(ask)
        exec(job["tests"], names)  # from the data set, and limited like the program
        if job["entry_point"]:
            names["check"](names[job["entry_point"]])
        return "passed"
    except TimeoutError:
        return "timed out"
    except Gone:
        return "failed: the program ended by itself"
    except OverflowError:
        return f"failed: an answer of more than {MAX_MESSAGE >> 20} MB"
    except BaseException as error:
        return f"failed: {type(error).__name__}: {str(error)[:200]}"


def main() -> None:
    """Judge the job on standard input, or be its worker."""
    if sys.argv[1:2] == ["worker"]:
        job = json.loads(sys.stdin.buffer.read())
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the program runs
        work(job, int(sys.argv[2]), int(sys.argv[3]))
    else:
        job = json.loads(sys.stdin.buffer.read())
        verdict_to = os.dup(1)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.set_inheritable(verdict_to, False)
        os.write(verdict_to, judge(job, job.pop("source")).encode("utf-8", "replace")[:4000])
    os._exit(0)


if __name__ == "__main__":
    main()
