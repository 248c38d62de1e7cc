"""Changing running clients from outside: their class, priority, weight, policy and limit of memory.

::

    import cudasched.control

    for client in cudasched.control.clients():
        if client.name == "train.py":
            cudasched.control.change(client.id, client_class="best_effort", weight=0.5)

A change is written into the shared table of a GPU. The client's own ticker thread makes the change, at once while the
client works and within a second while idle. The launch path is not involved. The change holds on all of the client's
GPUs and ends with the client. The table file's permissions decide: only the user of these clients may change them.
`cudasched top`, `cudasched serve` and its gRPC service change clients by these functions.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cudasched import hook
from cudasched._output import Output
from cudasched._text import shown
from cudasched.config import parse
from cudasched.errors import ArbiterError, ConfigError, Error
from cudasched.observe._metrics import Device, Process
from cudasched.observe._metrics import clients as read_clients

if TYPE_CHECKING:
    from cudasched.observe.trace._timeline import Summary

__all__ = ["Client", "ControlError", "change", "client_of", "clients", "trace"]

_TIMEOUT_S = 5.0
_LONGEST_TIMEOUT_S = 60.0
_LONGEST_TRACE_S = 60.0
_LOCK = ".lock"

_WHY = {
    "no_client": "there is no such client; it may have ended",
    "ended": "the client ended before an answer",
    "busy": "another change of the client was not over in time; try again",
    "withdrawn": "the client did not answer in time (stopped, or waiting for a disk?), and nothing was changed",
    "unclear": "the client was stopped during the change, which may hold or not; look again",
    "regions": "regions decide the class of the client; change the regions in the program",
    "policy_hangs": "the program's own policy does not answer, and cannot be replaced",
    "holds_more": "the client holds more on a GPU; free memory in the program first",
    "traced": "the client is being traced already",
    "no_trace": "the trace cannot be written beside the GPU's table; the program's log says why",
    "unknown": "the client knows no such setting or value; the table may be damaged",
}


class ControlError(Error):
    """A change was not made.

    Attributes:
        reason: ``no_client``, ``ended``, ``busy``, ``withdrawn``, ``unclear``, ``regions``, ``policy_hangs``,
            ``holds_more``, ``traced``, ``no_trace`` or ``unknown``.
        applied: Of several settings, those that were changed before this one.
    """

    def __init__(self, client: str, setting: str, reason: str, applied: tuple[str, ...] = ()) -> None:
        done = f"; {' and '.join(applied)} had been changed before" if applied else ""
        super().__init__(f"client {client}: {setting} was not changed: {_WHY.get(reason, reason)}{done}")
        self.reason = reason
        self.applied = applied


@dataclass(frozen=True)
class Client:
    """One process under cudasched, on all of its GPUs.

    Attributes:
        id: 16 hexadecimal digits, drawn when the process started; by this a client is changed.
        pid: The number in the client's own pid namespace; for display only.
        name: ``CUDASCHED_NAME``, else the program's name.
        client_class: Of its launches that no region and no stream decides.
        classes: Those that it has used so far.
        priority: Within the class, higher first. While a latency region with a priority of its own is open: the
            region's.
        weight: Multiplies the share among best-effort clients.
        policy: The policy for its best-effort launches; ``own``: the program's own policy.
        slo_ms: Its own latency target, ms; None: none.
        memory_bytes: Memory allocated on its GPUs and not freed.
        memory_limit_bytes: The most that it may allocate on each; None: no limit.
        gpus: UUIDs of the GPUs.
        version: Of cudasched in the client.
    """

    id: str
    pid: int
    name: str
    client_class: str
    classes: tuple[str, ...]
    priority: int
    weight: float
    policy: str
    slo_ms: float | None
    memory_bytes: int
    memory_limit_bytes: int | None
    gpus: tuple[str, ...]
    version: str


def client_of(process: Process) -> Client:
    """A process that can be changed."""
    found = [client for _, client in process.clients]
    # Of a process with several clients on one GPU, each has the memory of its class.
    held: dict[tuple[str, int], int] = {(uuid, client.slot): client.memory_bytes for uuid, client in process.clients}
    own = next((client for client in found if client.client_class == client.process_class), found[0])
    return Client(
        id=f"{process.number:016x}",
        pid=process.pid,
        name=process.name,
        client_class=own.process_class,
        classes=tuple(sorted({client.client_class for client in found})),
        priority=own.priority,
        weight=own.weight,
        policy=own.policy,
        slo_ms=own.slo_ms,
        memory_bytes=sum(held.values()),
        memory_limit_bytes=own.memory_limit_bytes,
        gpus=tuple(dict.fromkeys(uuid for uuid, _ in process.clients)),
        version=process.version,
    )


def _read(directory: str | os.PathLike[str] | None) -> tuple[list[Device], list[Process]]:
    devices, processes = read_clients(directory)
    # One that has said no number yet cannot be changed; it says one within some milliseconds.
    return devices, [process for process in processes if process.number != 0]


def clients(directory: str | os.PathLike[str] | None = None) -> list[Client]:
    """Every client of this user that can be changed, by pid.

    Args:
        directory: The run directory; None: ``CUDASCHED_RUN_DIR`` or its default.

    Raises:
        HookError: The package was not built, or two installations of cudasched are in this process.
    """
    return sorted(map(client_of, _read(directory)[1]), key=lambda client: (client.pid, client.id))


def _checked(setting: str, value: object) -> str:
    try:
        parsed = parse(setting, value, False)
    except ValueError as error:
        raise ConfigError(f"{setting} = {shown(value)} {error}") from None
    return format(parsed, ".17g") if isinstance(parsed, float) else str(parsed)


def _number(client: str) -> int:
    if not re.fullmatch(r"[0-9a-f]{16}", client):
        raise ConfigError(f"the id of a client has 16 hexadecimal digits; got {shown(client)}")
    return int(client, 16)


def _table_of(client: str, setting: str, directory: str | os.PathLike[str] | None) -> Path:
    """A table that the client is in."""
    devices, processes = _read(directory)
    found = next((process for process in processes if process.number == int(client, 16)), None)
    if found is None:
        unreadable = next((device.error for device in devices if device.error), "")
        if unreadable and not processes:
            raise ArbiterError(unreadable)
        raise ControlError(client, setting, "no_client")
    paths = {device.uuid: device.path for device in devices}
    return paths[found.clients[0][0]]


def change(
    client: str,
    *,
    client_class: str | None = None,
    priority: int | None = None,
    weight: float | None = None,
    policy: str | None = None,
    memory_limit: int | str | None = None,
    parked: bool | None = None,
    directory: str | os.PathLike[str] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> Client:
    """Changes settings of a running client, one after the other, and waits until each holds.

    Args:
        client: Its `Client.id`.
        client_class: ``latency``, ``normal`` or ``best_effort``: of its launches from now on. A program that has
            entered regions chooses the class itself, and is refused.
        priority: -8 to 8.
        weight: 0.01 to 100.
        policy: ``strict``, ``slack``, ``harvest`` or ``open``; also in the place of the program's own. `harvest` also
            needs latency clients that were started with ``harvest`` (``docs/policies.md``).
        memory_limit: Most bytes that the client may allocate on each GPU, as a number or as ``20GiB``, in whole MiB; 0
            or ``none``: no limit. A limit below its present memory is refused.
        parked: True: the client stops, and its memory moves to the host, where that can be done (``docs/memory.md``);
            False: back. The move follows the answer: `cudasched.Client.memory_away_bytes`. A client without
            ``pageable`` and ``park``, or with ``give_back_ms = 0``, is refused.
        directory: The run directory; None: ``CUDASCHED_RUN_DIR`` or its default.
        timeout_s: For each answer, at most a minute.

    Returns:
        The client after the change.

    Raises:
        ConfigError: A value has no meaning; nothing was changed.
        ControlError: The client cannot be changed, or not in this way. The message names the changes already made,
            which stay.
        ArbiterError: A table cannot be opened: it is another user's, damaged or of another version.
        HookError: The package was not built, or two installations of cudasched are in this process.
    """
    number = _number(client)
    wanted: dict[str, object] = {
        "client_class": client_class,
        "priority": priority,
        "weight": weight,
        "policy": policy,
        "memory_limit": memory_limit,
    }
    values = {name: _checked(name, value) for name, value in wanted.items() if value is not None}
    if parked is not None:
        values["parked"] = "on" if parked else "off"
    if not 0 <= timeout_s <= _LONGEST_TIMEOUT_S:
        raise ConfigError(f"timeout_s = {shown(timeout_s)} must be a number of seconds, from 0 to 60")
    core = hook.load_core()
    table = _table_of(client, next(iter(values), "it"), directory)
    applied: list[str] = []
    for setting, text in values.items():
        name = "class" if setting == "client_class" else setting
        outcome = core.change(str(table), number, name, text, int(timeout_s * 1e9))
        if outcome != "applied":
            raise ControlError(client, name, outcome, tuple(applied))
        applied.append(name)
    again = next((process for process in _read(directory)[1] if process.number == number), None)
    if again is None:
        raise ControlError(client, "it", "ended", tuple(applied))
    return client_of(again)


def _lock(place: Path) -> int | None:
    """A locked descriptor of the file beside a trace's directory, which the client makes anew; None: in use."""
    file = place.with_name(f"{place.name}{_LOCK}")
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(file)):  # not one that was removed meanwhile
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _remove(place: Path, lock: int) -> None:
    """Removes a trace's records, and then its lock."""
    shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(place.with_name(f"{place.name}{_LOCK}"))
    os.close(lock)


@contextlib.contextmanager
def _tracing(traces: Path, client: str) -> Iterator[Path]:
    """The directory of a client's records, from before the request until the records are a trace.

    Raises:
        ControlError: The client is being traced already: a trace ends with its writing, not with its seconds.
        Error: Nothing can be written there.
    """
    place = traces / client
    try:
        traces.mkdir(mode=0o700, exist_ok=True)
        lock = _lock(place)
    except OSError as error:
        raise Error(f"{place}: nothing can be traced there: {error.strerror}") from None
    if lock is None:
        raise ControlError(client, "its trace", "traced")
    try:
        yield place
    finally:
        _remove(place, lock)


def remove_left_traces(directory: str | os.PathLike[str] | None = None) -> None:
    """Removes the records of traces whose process was killed, once no client can write to them any more.

    Args:
        directory: The run directory; None: ``CUDASCHED_RUN_DIR`` or its default.
    """
    traces = Path(directory if directory is not None else hook.load_core().run_directory()) / "traces"
    try:
        places = {traces / name.removesuffix(_LOCK) for name in os.listdir(traces)}
    except OSError:
        return
    for place in places:
        with contextlib.suppress(OSError):
            newest = max(entry.stat().st_mtime for entry in (*traces.glob(f"{place.name}*"), *place.glob("*")))
            if time.time() - newest > _LONGEST_TRACE_S and (lock := _lock(place)) is not None:
                _remove(place, lock)


def trace(
    client: str,
    path: str | os.PathLike[str],
    seconds: float = 1.0,
    *,
    format: str | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> Summary:
    """Traces a running client for a while (``docs/traces.md``), and waits for the trace.

    The client keeps at most 64 MiB of records, in the run directory; the records go when the trace is written. Where
    this process is killed meanwhile, the client ends the trace by itself, and the next trace of any client removes the
    records.

    Args:
        client: Its `Client.id`.
        path: The trace.
        seconds: For how long, at most a minute.
        format: ``"perfetto"`` or ``"json"``; None: by the file's name, Perfetto unless that ends in ``.json``.
        directory: The run directory; None: ``CUDASCHED_RUN_DIR`` or its default.

    Returns:
        The numbers of records that the trace has and lacks.

    Raises:
        ConfigError: An argument has no meaning, or the file cannot be written.
        ControlError: The client cannot be traced, is being traced already, or ended meanwhile.
        Error: Nothing was traced, or the trace cannot be written.
    """
    from cudasched.observe.trace._parts import convert, format_of  # also imports the kernels' judge, for this alone

    number = _number(client)
    if not 0.001 <= seconds <= _LONGEST_TRACE_S:
        raise ConfigError(f"seconds = {shown(seconds)} must be a number of seconds, from 0.001 to 60")
    output = Output(path)
    form = format_of(Path(path), format)
    core = hook.load_core()
    table = _table_of(client, "its trace", directory)
    traces = table.parent / "traces"
    remove_left_traces(table.parent)

    def ask(milliseconds: int) -> None:
        outcome = core.change(str(table), number, "trace", str(milliseconds), int(_TIMEOUT_S * 1e9))
        if outcome != "applied":
            raise ControlError(client, "its trace", outcome)

    with _tracing(traces, client) as parts:
        ask(int(1000 * seconds))
        time.sleep(seconds)
        ask(0)
        summary = convert(parts, output, form, None)
    if summary.processes == 0:
        raise ControlError(client, "its trace", "ended")
    return summary
