"""Replicas on a Ray cluster, and how requests are dealt out to them."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import AsdsimError, CaptureError, TraceError, UsageError

LEASE_SECONDS = 30.0
"""A replica hands in what it has after so long; it finishes the request that it is at first."""
LEASE_ITEMS = 32
"""Items dealt out at once, at most."""
DEATHS = 3
"""Deaths of replicas with one item at hand after which that item is given up."""
RESTART_SECONDS = 120.0
"""How long Ray may take to start a lost replica again before that counts against it."""
GRACE_SECONDS = 60.0
"""How long replicas may take to hand in what is finished after Ctrl-C."""
LINE_SECONDS = 60.0
STARTS = 3
"""How often to try to start a cluster for one command."""
LOCAL_STORE = 128 << 20
"""Bytes of the object store of a cluster that is started for one command."""

Note = Callable[[str], None]


@dataclass(frozen=True)
class Where:
    """Where work is spread.

    Attributes
    ----------
    address : str
        ``auto`` for the cluster of this machine, ``local`` for one that is started here for this command alone, or an
        address that :func:`ray.init` takes.
    replicas : int, optional
        By default as many as the GPUs of the cluster allow, or without GPUs its cores.
    gpus : int, optional
        GPUs of each replica, all of one node; by default one where the cluster has any.
    threads : int
        CPU cores of each replica.
    """

    address: str
    replicas: int | None = None
    gpus: int | None = None
    threads: int = 1


@dataclass(slots=True)
class Item:
    """One thing to do, too small to be split.

    Attributes
    ----------
    payload : object
        What a replica is given.
    label : str
        How messages call it.
    deaths : int
        Replicas that have died while they had it.
    """

    payload: Any
    label: str
    deaths: int = 0


class Replica:
    """What every actor can do; ``work`` of a subclass takes payloads and returns results of the first few of them.

    Loading happens in :meth:`hello`, not in the constructor, so that an error in it reaches the driver as what it is.
    """

    def __init__(self, threads: int, *job: Any) -> None:
        os.environ["ASDSIM_THREADS"] = str(threads)  # as --threads: results may depend on it in their last bits
        self.threads, self.job = threads, job
        self.stopped = threading.Event()
        self.loaded = False

    def hello(self) -> str:
        """Load what is needed, once, and return the name of this node."""
        if not self.loaded:
            self.load()
            self.loaded = True
        return socket.gethostname()

    def load(self) -> None:
        """Load what ``work`` needs."""

    def stop(self) -> None:
        """Hand in what is finished as soon as possible; called while ``work`` runs."""
        self.stopped.set()


@dataclass
class Seat:
    """A replica as the driver sees it."""

    number: int
    actor: Any
    host: str = "?"
    items: list[Item] = field(default_factory=list)
    since: float = 0.0
    done: int = 0
    failures: int = 0
    lost: float | None = None

    def line(self, now: float) -> str:
        """Say what it is doing."""
        what = f"at {self.items[0].label} for {now - self.since:.0f} s" if self.items else "waiting"
        return f"replica {self.number} on {self.host}: {self.done} done, {what}"


class OwnThread:
    """Standard output for the thread that makes it: what another one prints, as Ray does of dead workers, is no result.

    It goes to standard error.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream if threading.get_ident() == self._thread else sys.stderr, name)


class Pool:
    """Replicas of one kind; a context manager, which starts them and lets them go.

    Parameters
    ----------
    where : Where
    kind : type
        Subclass of :class:`Replica`.
    job : tuple
        What each is constructed with.
    note : callable
        Told, line by line, what the replicas do: once a minute, and where one was lost.

    Attributes
    ----------
    interrupted : bool
        Ctrl-C ended the work; what was finished is kept.
    """

    def __init__(self, where: Where, kind: type[Replica], job: tuple[Any, ...], note: Note) -> None:
        self.where, self.kind, self.job, self.note = where, kind, job, note
        self.interrupted = False
        self.seats: list[Seat] = []
        self._groups: list[Any] = []
        self._mine = False
        self._stdout = sys.stdout
        self._refs: dict[Any, Seat] = {}  # hello or work of each replica that is up or starting
        self._again: list[tuple[float, Seat]] = []  # when to ask a replica that is being restarted
        self._idle: list[Seat] = []
        self._lines = time.monotonic()

    def __enter__(self) -> Pool:
        self._mine = connect(self.where)
        self._stdout, sys.stdout = sys.stdout, OwnThread(sys.stdout)  # type: ignore[assignment]
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        sys.stdout = self._stdout
        if self._mine:
            ray.shutdown()
            return
        for seat in self.seats:
            ray.kill(seat.actor)
        for group in self._groups:
            ray.util.remove_placement_group(group)

    def _start(self) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        gpus, number = share_of(self.where, ray.nodes())
        share = _counted(gpus, "GPU") if gpus else _counted(self.where.threads, "CPU thread")
        self.note(f"ray: {_counted(number, 'replica')} of {share}")
        actor = ray.remote(concurrency_groups={"control": 1})(self.kind)
        for n in range(number):
            options: dict[str, Any] = {
                "num_cpus": self.where.threads, "num_gpus": gpus, "max_restarts": -1, "max_task_retries": 0,
            }  # fmt: skip
            if gpus > 1:  # never on two nodes
                bundle = {"CPU": self.where.threads, "GPU": gpus}
                self._groups.append(placement_group([bundle], strategy="STRICT_PACK"))
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._groups[-1])
            seat = Seat(n + 1, actor.options(**options).remote(self.where.threads, *self.job))
            self.seats.append(seat)
            self._refs[seat.actor.hello.remote()] = seat

    def call(self, method: str, *args: Any) -> Any:
        """Return what a method of some replica returns."""
        answers: list[Any] = []

        def submit(seat: Seat, items: list[Item]) -> Any:
            return getattr(seat.actor, method).remote(*items[0].payload)

        def done(_: list[Item], answer: Any) -> int:
            answers.append(answer)
            return 1

        self._run(deque([Item(args, method)]), submit, done)
        return answers[0] if answers else None

    def run(
        self, items: Sequence[Item], done: Callable[[list[Item], Any], int],
        more: Callable[[], tuple[Any, ...]] = tuple, most: int = LEASE_ITEMS,
        moved: Callable[[Any], Any] = lambda payload: None,
    ) -> None:  # fmt: skip
        """Have all items done; returns early where ``interrupted``.

        Parameters
        ----------
        items : sequence of Item
        done : callable
            Given the items that a replica had and what its ``work`` returned; returns how many of them, from the first
            on, are done. The others are dealt out again.
        more : callable
            Returns arguments of ``work`` beside the payloads, anew each time.
        most : int
            Items to deal out at once.
        moved : callable
            Given the payload of an item whose part of a trace could not be read; returns the payload to try instead, or
            None if there is no other.

        Raises
        ------
        AsdsimError
            What a replica raised; or if replicas die again and again.
        """
        self._run(
            deque(items),
            lambda seat, some: seat.actor.work.remote([item.payload for item in some], *more()),
            done,
            most,
            moved,
        )

    def _run(
        self, todo: deque[Item], submit: Callable[[Seat, list[Item]], Any], done: Callable[[list[Item], Any], int],
        most: int = 1, moved: Callable[[Any], Any] = lambda payload: None,
    ) -> None:  # fmt: skip
        import ray

        end = 0.0
        while (todo and not self.interrupted) or any(seat.items for seat in self._refs.values()):
            try:
                while self._idle and todo and not self.interrupted:
                    seat = self._idle.pop()
                    # Ever fewer towards the end, so that none waits long for another; a suspect goes alone.
                    count = 1 if todo[0].deaths else min(most, -(-len(todo) // (2 * len(self.seats))))
                    seat.items = [todo.popleft() for _ in range(count)]
                    seat.since = time.monotonic()
                    self._refs[submit(seat, seat.items)] = seat
                self._ask_again()
                ready, _ = ray.wait(list(self._refs), num_returns=1, timeout=0.5) if self._refs else ([], [])
                if not self._refs:
                    time.sleep(0.5)
                for ref in ready:
                    self._settle(ref, todo, done, moved)
                self._tell()
                if self.interrupted and time.monotonic() > end:
                    return
            except KeyboardInterrupt:
                if self.interrupted:
                    return
                self.interrupted, end = True, time.monotonic() + GRACE_SECONDS
                self.note("interrupted: the replicas hand in what is finished; press Ctrl-C again to leave that")
                for seat in self.seats:
                    seat.actor.stop.options(concurrency_group="control").remote()

    def _settle(
        self, ref: Any, todo: deque[Item], done: Callable[[list[Item], Any], int], moved: Callable[[Any], Any]
    ) -> None:
        """Take what a replica answered: its result, its error, or nothing at all."""
        import ray

        from ..trace.interrupt import uninterrupted

        seat = self._refs.pop(ref)
        items, seat.items = seat.items, []
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, TraceError):
                payloads = [moved(item.payload) for item in items]
                if any(payload is not None for payload in payloads):
                    for item, payload in zip(items, payloads, strict=True):
                        item.payload = payload or item.payload
                    self._idle.append(seat)
                    todo.extendleft(reversed(items))
                    return
            if isinstance(error.cause, AsdsimError):
                raise error.cause from None
            cause = error.cause or error
            raise CaptureError(
                f"failed on {seat.host}: {type(cause).__name__}: {(str(cause).strip() or '-').splitlines()[-1]}",
                where=f"replica {seat.number}" + (f", {items[0].label}" if items else ""),
                fix="see the replica's log in Ray's session directory",
            ) from error
        except ray.exceptions.RayError as error:  # the process, its node or the way to it
            now = time.monotonic()
            seat.lost = now if seat.lost is None else seat.lost
            restarting = isinstance(error, ray.exceptions.ActorUnavailableError) and now - seat.lost < RESTART_SECONDS
            seat.failures += not restarting
            if items or not restarting:
                self.note(f"replica {seat.number} on {seat.host} was lost"
                          + (f" at {items[0].label}; that is done again" if items else "")
                          + f" ({type(error).__name__})")  # fmt: skip
            for item in items:
                item.deaths += 1
            if items and items[0].deaths >= DEATHS and len(items) == 1:
                raise CaptureError(
                    f"{DEATHS} replicas died at it", where=items[0].label,
                    fix="look for the reason in Ray's logs: most often memory (--batch, --kv-gb, --gpus-per-replica)",
                ) from None  # fmt: skip
            if not items and seat.failures > DEATHS and seat.done == 0:
                raise CaptureError(
                    f"does not start: {str(error).splitlines()[0]}", where=f"replica {seat.number}",
                    fix="asdsim must be installed on every node; where one was lost, run the same command again; "
                    "see Ray's logs",
                ) from None  # fmt: skip
            if all(other.failures > DEATHS for other in self.seats):
                raise CaptureError(
                    "the cluster is gone: no replica comes back", where=f"--ray {self.where.address}",
                    fix="run the same command again once it is there; what was stored is kept",
                ) from None  # fmt: skip
            todo.extendleft(reversed(items))
            self._again.append((now + 1.0, seat))
            return
        self._idle.append(seat)
        seat.failures, seat.lost = 0, None
        if not items:
            seat.host = str(answer)
            return
        with uninterrupted():
            count = done(items, answer)
        seat.done += count
        todo.extendleft(reversed(items[count:]))

    def _ask_again(self) -> None:
        now = time.monotonic()
        for entry in [entry for entry in self._again if entry[0] <= now]:
            self._again.remove(entry)
            self._refs[entry[1].actor.hello.remote()] = entry[1]

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._lines >= LINE_SECONDS:
            self._lines = now
            for seat in self.seats:
                self.note(seat.line(now))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def connect(where: Where) -> bool:
    """Connect to a cluster, or start one; return whether there was no connection before.

    Raises
    ------
    UsageError
        If Ray is not installed, or no cluster answers.
    """
    try:
        import ray
    except ImportError:
        raise UsageError(
            "Ray is not installed", where=f"--ray {where.address}",
            fix="pip install 'asdsim[ray]'; without it, split the work by asdsim capture --shard i/n",
        ) from None  # fmt: skip
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if where.address == "local":
        cores = max(os.cpu_count() or 1, where.threads * (where.replicas or 1))
        os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")  # a busy machine may need more than its 60
        how |= {"num_cpus": cores, "include_dashboard": False, "object_store_memory": LOCAL_STORE}
    for attempt in range(STARTS):
        try:
            ray.init(address=where.address, **how)
            return True
        except Exception as error:  # Ray raises bare ones, also where a busy machine starts its processes too slowly
            ray.shutdown()
            if where.address == "local" and attempt + 1 < STARTS:
                continue
            raise UsageError(
                f"no cluster answers: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
                where=f"--ray {where.address}", fix="give local, or the address that ray start --head printed; "
                "where the cluster asks for tokens, set RAY_AUTH_MODE=token",
            ) from None  # fmt: skip
    raise AssertionError


def share_of(where: Where, nodes: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return GPUs of each replica, and the number of replicas.

    Raises
    ------
    UsageError
        If no node can hold one.
    """
    held = [node.get("Resources", {}) for node in nodes if node.get("Alive")]
    per_node = [(int(one.get("GPU", 0)), int(one.get("CPU", 0))) for one in held]
    most = max((gpus for gpus, _ in per_node), default=0)
    gpus = min(1, most) if where.gpus is None else where.gpus
    if gpus > most:
        raise UsageError(
            f"no node of the cluster has {gpus} GPUs; the most is {most}", where="--gpus-per-replica",
            fix="give fewer, or leave it out",
        )  # fmt: skip
    fit = [min(cpu // where.threads, gpu // gpus if gpus else cpu) for gpu, cpu in per_node]
    if not sum(fit):
        raise UsageError(
            f"no node of the cluster has {where.threads} CPU cores for a replica", where="--threads", fix="give fewer"
        )
    return gpus, where.replicas or sum(fit)
