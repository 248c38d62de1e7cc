"""The clients on the GPUs of this user: the shared tables, and the engine of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudasched import hook
from cudasched._text import printable
from cudasched.errors import ArbiterError, Error, HookError

if TYPE_CHECKING:
    from cudasched import _core as stub

__all__ = ["LEVELS", "Client", "Device", "Kernels", "State", "kernels_of", "state", "status"]

_NS_PER_MS = 1e6
_NS_PER_S = 1e9

GRAPH_CHANGES = {
    "too_large": "capture parts of it",
    "branches": "join its branches more often",
    "waits": "order its collectives, by events within the capture",
    "memory_node": "allocate before the capture",
    "conditional": "branch on the host, or in a kernel",
    "event_node": "record behind the launch",
    "device_updated": "update its nodes from the host",
    "devices": "make a graph a device",
    "no_memory": "leave the GPU some memory",
    "too_slow": "raise graph_build_ms",
    "over_budget": "raise graph_slice_mb",
    "updated": "keep its nodes and edges as they are",
}
"""A program's possible changes for a graph to be cut, by the reason against a cut (docs/graphs.md)."""


def _coverage(launches: int, device_launches: int) -> float | None:
    return launches / device_launches if device_launches else None


@dataclass(frozen=True)
class WholeGraphs:
    """Executable graphs of a process that are launched whole, for one reason (``docs/graphs.md``).

    Attributes:
        graphs: How many there are now.
        longest_ms: Predicted time of the longest graph, ms: a request may wait for all of it.
        longest_nodes: Nodes of the longest graph.
    """

    graphs: int
    longest_ms: float
    longest_nodes: int


LEVELS = ("critical", "warning", "good", "not judged")
"""The verdicts on a kernel's launch shape, the worst first (docs/advise.md)."""

SHARE_UNIT = 1e6  # millionths


@dataclass(frozen=True)
class Kernels:
    """How a process's best-effort kernels use the GPU, as predicted at the first launch of each.

    A kernel counts once in each launch shape, for any time and any number of launches. Launches are
    predicted while a latency client is on the GPU, so before that there are none; nor of graphs.

    Attributes:
        count: How many there are, up to 4,096 a GPU.
        occupancy: The mean of their threads resident of those that a full SM can hold, 0 to 1; None: there are none.
        sm_utilisation: The mean use of the SMs: up to one wave those that have a block, above it waves over
            whole waves.
        block_efficiency: The mean of a block's threads over those of its warps.
        levels: How many are ``critical``, ``warning`` and ``good`` by the possible loss of the launch shape alone
            (``docs/advise.md``), and how many are libraries' and ``not judged``.
    """

    count: int = 0
    occupancy: float | None = None
    sm_utilisation: float | None = None
    block_efficiency: float | None = None
    levels: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0))


def launches_of(counts: stub.Counts) -> int:
    """The launches of a process in all classes."""
    return sum(counts.numbers[f"{name}_launches"] for name in ("normal", "latency", "best_effort"))


def kernels_of(counts: stub.Counts) -> Kernels:
    """The means of a process's counts of kernels."""
    count = sum(counts.kernels)
    if count == 0:
        return Kernels()
    # The sums grow before the number does, by the kernel that is being counted.
    occupancy, sm_utilisation, block_efficiency = (
        min(1.0, counts.numbers[name] / SHARE_UNIT / count)
        for name in ("kernel_occupancy", "kernel_sm_utilisation", "kernel_block_efficiency")
    )
    return Kernels(count, occupancy, sm_utilisation, block_efficiency, dict(zip(LEVELS, counts.kernels, strict=True)))


TIME_SLICES = ("", "on", "off", "mps", "shared", "unseen", "refused", "closed", "tool")
"""The states of a client's time slices; empty: the client is not best effort (`Client.time_slice`)."""


@dataclass(frozen=True)
class Client:
    """One process on one GPU in one class.

    Attributes:
        slot: The place in the GPU's table.
        pid: As its own pid namespace numbers it; for display only.
        name: ``CUDASCHED_NAME``, else the program's name.
        client_class: ``latency``, ``normal`` or ``best_effort``.
        priority: Within the class, higher first.
        slo_ms: The client's own latency target, ms; None: none.
        alive: Whether the process lives.
        active: A latency client that holds the gate closed now.
        waiting: A best-effort client that waits at the gate now.
        regions: Regions open now.
        hook_attached: Whether its launches are seen.
        age_s: Since it came, s.
        heartbeat_age_s: Since its last sign of life, s.
        in_flight_ms: Predicted GPU time still to run of the client's submitted work, ms.
        overdue_s: Since its oldest launch in flight should have been done, s; 0: none is late. Launches that the gate
            does not see (no latency client was there) are not known.
        policy_s: Since its own policy was asked and has not answered, s; 0: it answers.
        deadline_in_ms: Until the earliest deadline of its regions, ms; negative: passed; None: none.
        launches: Kernel and graph launches in this class.
        device_launches: Launches that the device ran, as CUPTI counts them; 0: not counted.
        gate_waits: Launches that waited at the gate.
        gate_wait_ms: Time spent at the gate, ms.
        process: The same number for all clients of one process, and for no other's, whatever their pid namespaces; 0:
            not said yet.
        normal_beside_best_effort: Launches of its process that went as ``normal`` on streams that best effort uses
            (`State` says more): as of some milliseconds ago.
        memory_bytes: The client's allocations on the GPU, as asked of the driver; without contexts and modules. Its
            process's allocations in a class that is no client stand with another client of that process.
        memory_peak_bytes: The most that its process had allocated on the GPU.
        memory_limit_bytes: The most that its process may allocate (``memory_limit``); None: no limit.
        memory_away_bytes: Memory that the host keeps for the client while it is parked (``docs/memory.md``); not in
            ``memory_bytes``.
        memory_given_bytes: Memory given back to latency clients that asked for memory.
        memory_refusals: How often it was asked and could not, because it captured a graph.
        pool_reserved_bytes: The GPU's memory that its process keeps in pools (`cudasched.memory`), of ``memory_bytes``.
        pool_allocated_bytes: Of these, in blocks that are in use.
        pool_largest_free_bytes: The largest block that the free memory of one pool can become.
        version: The client's version of cudasched.
        process_class: Class of the launches of its process that no region and no stream decides; a client that a
            process has in another class is of its regions, or from before its class was changed.
        weight: Multiplies its share among best-effort clients.
        policy: The policy of its best-effort launches: a name of the setting ``policy``, ``own`` for one that the
            program brings; empty: not known.
        time_slice: Whether the GPU interrupts its kernels for other processes: ``on``, after `time_slice_us`; ``off``
            (its setting); ``mps`` (all MPS clients share one slice); ``shared`` (its process has latency work, too);
            ``unseen`` (its contexts were not seen: another driver, or CUDA was begun before cudasched); ``refused`` by
            the driver; ``closed`` (the program has closed the driver's files); ``tool`` (a debugger, sanitizer or
            profiler is in it); empty: it is not best effort. Of latency work: ``on`` beside best effort, else empty.
        time_slice_us: How long the GPU runs it before it interrupts it, us; None: as the driver has it, 2,048.
        whole_graphs: Graphs of its process that are launched whole, by reason: as of a second ago.
        kernels: How the best-effort kernels of its process, on all of the process's GPUs, use the GPU.
        active_since_s: When it last began to be active, s, as `time.monotonic` counts; None: it never was.
    """

    slot: int
    pid: int
    name: str
    client_class: str
    priority: int
    slo_ms: float | None
    alive: bool
    active: bool
    waiting: bool
    regions: int
    hook_attached: bool
    age_s: float
    heartbeat_age_s: float
    in_flight_ms: float
    overdue_s: float
    policy_s: float
    deadline_in_ms: float | None
    launches: int
    device_launches: int
    gate_waits: int
    gate_wait_ms: float
    process: int
    normal_beside_best_effort: int
    memory_bytes: int
    memory_peak_bytes: int
    memory_limit_bytes: int | None
    memory_away_bytes: int
    memory_given_bytes: int
    memory_refusals: int
    pool_reserved_bytes: int
    pool_allocated_bytes: int
    pool_largest_free_bytes: int
    version: str
    process_class: str = "normal"
    weight: float = 1.0
    policy: str = ""
    time_slice: str = ""
    time_slice_us: int | None = None
    whole_graphs: Mapping[str, WholeGraphs] = field(default_factory=dict)
    kernels: Kernels = field(default_factory=Kernels)
    active_since_s: float | None = None

    @property
    def pool_fragmentation(self) -> float:
        """The part of its pools' free memory that is beyond the largest block, 0 to 1."""
        free = self.pool_reserved_bytes - self.pool_allocated_bytes
        return 1 - self.pool_largest_free_bytes / free if free > 0 else 0.0

    @property
    def coverage(self) -> float | None:
        """Launches that the hook saw / launches that the device ran; None where the device's are not counted."""
        return _coverage(self.launches, self.device_launches)


@dataclass(frozen=True)
class Device:
    """One GPU and its clients.

    Attributes:
        name: As the driver names it.
        uuid: ``GPU-...``, or ``MIG-...`` for a MIG instance.
        path: The shared table.
        clients: Who is on it, by slot.
        error: Why the table cannot be read; empty if it can.
    """

    name: str
    uuid: str
    path: Path
    clients: tuple[Client, ...]
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Numbers of a process (``include/cudasched/counts.inc``), from its first CUDA call on.

    Attributes:
        gated_launches: Best-effort launches that found the gate on, whether or not they waited.
        offloaded_launches: Best-effort launches that the launcher thread made while the program went on.
        untracked_launches: Gated launches whose completion could not be followed.
        gate_exceptions: Launches that were held because of work in flight, and went because that work might wait for
            them.
        backed_off: Best-effort launches, and waits, that let a request of the same program go first on the host.
        sliced_launches: Graph launches that were submitted in slices, so that the gate could close between two
            (``docs/graphs.md``).
        slice_launches: In how many slices; each counts as a launch.
        copy_pieces: Pieces of long best-effort copies between pinned memory and the GPU, submitted one by one beside a
            latency client (``docs/order.md``).
        prioritised_graphs: Graphs instantiated with a priority for their kernel nodes, by their caller's class.
        unprioritised_graphs: Graphs for which the driver refused the priority.
        normal_beside_best_effort: Launches that went as ``normal`` on a stream that best effort uses: by a thread in a
            region of class ``normal``, or on a stream that latency work uses too. Much of this lets best-effort work
            past the gate.
        contested_streams: How often latency work was launched on a stream that a best-effort region uses.
        unmet_collectives: Collectives of a job on several GPUs that waited 20 ms at the gate for another member, and
            went without it.
        clean_segments: Segments of latency requests, from one wait for the GPU to the next, that were kept without best
            effort under policy ``harvest``, to measure their own time.
        halved_budgets: How often requests beside best effort exceeded their budget, which was halved then.
        profile_fallbacks: How often requests differed from earlier ones, so that no best effort was admitted until the
            requests were known again.
        device_launches: Launches that the device ran, as CUPTI counts them; 0: not counted.
        without_room: Kernels whose parameters the predictor had no room to learn.
    """

    gated_launches: int = 0
    offloaded_launches: int = 0
    untracked_launches: int = 0
    gate_exceptions: int = 0
    backed_off: int = 0
    sliced_launches: int = 0
    slice_launches: int = 0
    copy_pieces: int = 0
    prioritised_graphs: int = 0
    unprioritised_graphs: int = 0
    normal_beside_best_effort: int = 0
    contested_streams: int = 0
    unmet_collectives: int = 0
    clean_segments: int = 0
    halved_budgets: int = 0
    profile_fallbacks: int = 0
    device_launches: int = 0
    without_room: int = 0


@dataclass(frozen=True, kw_only=True)
class State(Counted):
    """The state and the counts of cudasched in this process.

    Attributes:
        installed: The shim stands in front of the driver.
        attached: The program has made a CUDA call through it.
        scheduling: Classes have an effect; False before the first CUDA call, when off, and after a fault.
        process_class: Class of launches that no region and no stream decides.
        driver_version: As ``cuDriverGetVersion`` gives it (13000 is 13.0); 0 before ``cuInit``.
        launches: Kernel and graph launches that the hook saw, failed ones left out.
        latency_launches: Of these, in class ``latency``.
        best_effort_launches: Of these, in class ``best_effort``.
        gate_waits: Gated launches that waited.
        gate_wait_ns: Time they waited, ns.
        unknown_handles: How often a stream, event or executable graph found no place among the 131,072 of its kind that
            are known, so that calls on it are not deferred, or a stream no place for the mark of a best-effort region:
            launches there by a thread in no region are of the process's class then.
        launcher_cpu_ns: CPU time of the launcher threads of this process, ns.
        launcher_driver_ns: Of it, about how much was spent inside the driver's calls, ns.
        graphs_sliced: Executable graphs that have slices now.
        graph_slices: How many they have.
        graph_slice_bytes: GPU memory of these slices, about.
        graph_builds: Graphs that were cut into slices, or tried to be.
        graph_build_ns: Time that took in the background, in all, ns.
        graph_slices_dropped: Graphs whose slices were given up: changed, or launched no more.
        longest_whole_graph_ns: The longest of the graphs that stay whole, as predicted, ns.
        graphs_whole: Executable graphs that stay whole, by reason.
        off_reason: Why scheduling is off; empty if it is not.
        driver_path: The real driver; empty before the first CUDA call.
    """

    installed: bool = False
    attached: bool = False
    scheduling: bool = False
    process_class: str = "normal"
    driver_version: int = 0
    launches: int = 0
    latency_launches: int = 0
    best_effort_launches: int = 0
    gate_waits: int = 0
    gate_wait_ns: int = 0
    unknown_handles: int = 0
    launcher_cpu_ns: int = 0
    launcher_driver_ns: int = 0
    graphs_sliced: int = 0
    graph_slices: int = 0
    graph_slice_bytes: int = 0
    graph_builds: int = 0
    graph_build_ns: int = 0
    graph_slices_dropped: int = 0
    longest_whole_graph_ns: int = 0
    graphs_whole: Mapping[str, int] = field(default_factory=dict)
    off_reason: str = ""
    driver_path: str = ""

    @property
    def coverage(self) -> float | None:
        """Launches that the hook saw / launches that the device ran; None where the device's are not counted."""
        return _coverage(self.launches, self.device_launches)


_not_installed_because = ""


def note_not_installed(reason: str) -> None:
    """Notes for `state` why the hook is not installed in this process; empty: the hook is."""
    global _not_installed_because
    _not_installed_because = reason


def state() -> State:
    """The state and the counts of cudasched in this process. Never raises: ``off_reason`` says why the hook is off."""
    reason = f"CUDASCHED_OFF={os.environ['CUDASCHED_OFF']}" if hook.switched_off() else ""
    try:
        core = hook.load_core()
    except HookError as error:
        return State(off_reason=reason or str(error))
    seen, counts = core.state(), core.counts()
    waits, gate_wait_ns = counts.gate_waits
    numbers = counts.numbers
    values: dict[str, Any] = {
        "launches": launches_of(counts),
        "gate_waits": sum(waits),
        "gate_wait_ns": gate_wait_ns,
    }
    for name in {known.name for known in fields(State)} - {"installed", *values}:
        values[name] = numbers[name] if name in numbers else getattr(seen, name)
    values["off_reason"] = values["off_reason"] or reason or _not_installed_because
    if not values["off_reason"] and not values["attached"] and (driver := hook.driver_past_the_shim()):
        values["off_reason"] = f"the driver was opened by its path, {driver}, past cudasched"
    return State(installed=hook.installed(), **values)


def client_of(seen: stub.Client, counts: stub.Counts | None = None) -> Client:
    """A client of the engine's table with its process's counts, in the units of `Client`."""
    whole = counts.whole_graphs if counts else {}
    in_units: dict[str, Any] = {
        "slo_ms": seen.slo_ns / _NS_PER_MS if seen.slo_ns else None,
        "age_s": seen.age_ns / _NS_PER_S,
        "heartbeat_age_s": seen.heartbeat_age_ns / _NS_PER_S,
        "active_since_s": seen.active_since_ns / _NS_PER_S or None,
        "in_flight_ms": seen.in_flight_ns / _NS_PER_MS,
        "overdue_s": seen.overdue_ns / _NS_PER_S,
        "policy_s": seen.policy_ns / _NS_PER_S,
        "deadline_in_ms": seen.deadline_in_ns / _NS_PER_MS if seen.deadline_in_ns else None,
        "gate_wait_ms": seen.gate_wait_ns / _NS_PER_MS,
        "memory_limit_bytes": seen.memory_limit_bytes or None,
        "weight": seen.weight_milli / 1000,
        "time_slice": TIME_SLICES[seen.time_slice_state] if seen.time_slice_state < len(TIME_SLICES) else "",
        "time_slice_us": seen.time_slice_us or None,
        "whole_graphs": {
            name: WholeGraphs(count, ns / _NS_PER_MS, nodes) for name, (count, ns, nodes) in whole.items()
        },
        "kernels": kernels_of(counts) if counts else Kernels(),
    }
    as_seen = {each.name: getattr(seen, each.name) for each in fields(Client) if each.name not in in_units}
    return Client(**as_seen, **in_units)


def counts_of(core: hook._Core, path: Path) -> tuple[str, list[tuple[stub.Client, stub.Counts | None]]]:
    """The GPU's name and its clients, by a table's file.

    Raises:
        ArbiterError: The table cannot be read, or has a name that is no text.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ArbiterError(f"{printable(str(path))}: its name is no UTF-8; remove it") from None
    return core.read_counts(str(path))


def status() -> list[Device]:
    """Reads every table of this user (``CUDASCHED_RUN_DIR`` or its default); dead clients' slots are given back.

    Returns:
        The GPUs that cudasched's clients have used, by UUID; empty if there are none. A table that cannot be read has
        ``error`` set, and so has one entry for a directory that cannot be read.

    Raises:
        HookError: The package was not built, or two installations of cudasched are in this process.
    """
    core = hook.load_core()
    devices = []
    directory = Path(core.run_directory())
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".arbiter"))
    except FileNotFoundError:
        names = []
    except OSError as error:
        why = f"the directory of the client tables cannot be read: {error.strerror}"
        return [Device(name="", uuid="", path=directory, clients=(), error=why)]
    for path in (directory / name for name in names):
        try:
            name, clients = counts_of(core, path)
        except Error as error:
            shown = Path(printable(str(path)))
            devices.append(Device(name="", uuid=shown.stem, path=shown, clients=(), error=str(error)))
            continue
        # A process's counts stand with the first of its clients alone.
        counts = {client.process: counted for client, counted in clients if counted is not None}
        seen = (client_of(client, counted or counts.get(client.process)) for client, counted in clients)
        ordered = sorted(seen, key=lambda client: client.slot)
        devices.append(Device(name=name, uuid=path.stem, path=path, clients=tuple(ordered)))
    return devices
