"""`cudasched status`: who is on which GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cudasched import hook
from cudasched._document import document
from cudasched._table import Column, fitted, terminal_columns
from cudasched._text import counted, printable
from cudasched.cli.run import configure
from cudasched.status import GRAPH_CHANGES, Client, Device, status

if TYPE_CHECKING:
    from cudasched.observe import Gpu

__all__ = ["show_status"]

_WATCH_S = 1.0
_FIRST_LOOK_S = 0.1
"""Before the first one is shown: a client that launches meanwhile is busy."""
_OVERDUE_S = 1.0
"""A launch that is later than that, whatever was predicted, may never end."""

_CLASSES = {
    "latency": "latency: the others make way while it is active",
    "normal": "normal: passes at once and holds nobody back",
    "best_effort": "best_effort: is interrupted for the others, or waits at the gate while latency work is active",
}


def _state(client: Client, before: Mapping[int, int]) -> str:
    if not client.alive:
        return "dead"
    if client.policy_s > 0:
        return f"its policy hangs {client.policy_s:.0f} s"
    if client.overdue_s > _OVERDUE_S:
        return f"overdue {client.overdue_s:.0f} s"
    if client.active:
        return "active"
    if client.waiting:
        return "waiting"
    if client.in_flight_ms > 0 or client.launches > before.get(client.slot, client.launches):
        return "busy"
    return "idle" if client.hook_attached else "not hooked"


def _launches(devices: Iterable[Device]) -> dict[str, dict[int, int]]:
    """Of each client, by its GPU and its slot."""
    return {device.uuid: {client.slot: client.launches for client in device.clients} for device in devices}


def _processes(clients: Iterable[Client]) -> list[list[Client]]:
    """The clients of each process, one a class. Pids are of several namespaces: what else is known goes with them."""
    found: dict[tuple[int, int, str], list[Client]] = {}
    for client in clients:
        found.setdefault((client.process, client.pid, client.name), []).append(client)
    return list(found.values())


def _each(process: Sequence[Client], values: Sequence[str]) -> str:
    """One value for all classes of a process, or each with its class."""
    if len(set(values)) == 1:
        return values[0]
    return ", ".join(f"{value} ({client.client_class})" for client, value in zip(process, values, strict=True))


def _time(ms: float) -> str:
    return f"{ms / 1e3:.1f} s" if ms >= 10_000 else f"{ms:.1f} ms"


def _size(memory_bytes: int) -> str:
    return _gib(memory_bytes) if memory_bytes >= 2**30 else f"{memory_bytes / 2**20:.0f} MiB"


def _columns(processes: Sequence[Sequence[Client]], before: Mapping[int, int]) -> list[Column]:
    def waits(process: Sequence[Client]) -> str:
        count = sum(client.gate_waits for client in process)
        return f"{_time(sum(client.gate_wait_ms for client in process))} in {count}" if count else "-"

    def slo(process: Sequence[Client]) -> str:
        targets = [f"{client.slo_ms:g}" for client in process if client.slo_ms is not None]
        return targets[0] if targets else "-"

    def time_slice(process: Sequence[Client]) -> str:
        told = [client for client in process if client.time_slice]
        if not told:
            return "-"
        return told[0].time_slice if told[0].time_slice_us is None else f"{told[0].time_slice_us} us"

    def coverage(process: Sequence[Client]) -> str:
        known = [client.coverage for client in process if client.coverage is not None]
        return f"{100 * min(known):.2f} %" if known else "-"

    def memory(process: Sequence[Client]) -> str:
        held = sum(client.memory_bytes for client in process)
        limit = process[0].memory_limit_bytes
        of = "" if limit is None else f" of {_size(limit)}"
        if sum(1 for client in process if client.memory_bytes) < 2:
            return f"{_size(held)}{of}" if held or limit else "-"
        parts = (f"{_size(each.memory_bytes)} {each.client_class}" for each in process if each.memory_bytes)
        return f"{' + '.join(parts)}{of}"

    return [
        Column("pid", [str(process[0].pid) for process in processes], is_number=True),
        Column("name", [process[0].name for process in processes], may_shorten=True),
        Column("class", [" + ".join(client.client_class for client in process) for process in processes]),
        Column("state", [_each(process, [_state(client, before) for client in process]) for process in processes]),
        Column("gate wait", [waits(process) for process in processes], 10, is_number=True),
        Column("memory", [memory(process) for process in processes], 9, is_number=True),
        Column("time slice", [time_slice(process) for process in processes], 11, is_number=True),
        Column("SLO ms", [slo(process) for process in processes], 9, is_number=True),
        Column(
            "in flight ms",
            [f"{sum(client.in_flight_ms for client in process):.3f}" for process in processes],
            8,
            is_number=True,
        ),
        Column(
            "launches", [str(sum(client.launches for client in process)) for process in processes], 7, is_number=True
        ),
        Column("coverage", [coverage(process) for process in processes], 6, is_number=True),
        Column(
            "prio", [_each(process, [str(client.priority) for client in process]) for process in processes], 5, True
        ),
        Column("regions", [str(sum(client.regions for client in process)) for process in processes], 4, is_number=True),
        Column(
            "heartbeat",
            [f"{min(client.heartbeat_age_s for client in process):.1f} s" for process in processes],
            3,
            is_number=True,
        ),
        Column("slot", [" ".join(str(client.slot) for client in process) for process in processes], 2, is_number=True),
    ]


_NOISE_BYTES = 64 << 20
"""Memory that is not worth a line."""


def _gpus(devices: Sequence[Device]) -> dict[str, Gpu]:
    """What NVML says of the GPUs; nothing where it is not installed."""
    from cudasched.observe import gpus, of_status

    return gpus(*of_status(devices))


def _gib(memory_bytes: int) -> str:
    return f"{memory_bytes / 2**30:.1f} GiB"


def _others(devices: Sequence[Device], gpus: dict[str, Gpu]) -> list[RenderableType]:
    """Lines for processes on the GPUs that are no clients, or cannot be told."""
    lines: list[RenderableType] = []
    for device in devices:
        if (gpu := gpus.get(device.uuid)) is None:
            continue
        for each in gpu.foreign:
            memory = "" if each.memory_bytes is None else f", {_gib(each.memory_bytes)}"
            why = (
                "under cudasched with another run directory, so that neither knows of the other: share one "
                "(CUDASCHED_RUN_DIR, docs/containers.md)"
                if each.elsewhere
                else "not under cudasched: it holds nobody back and is not held back"
            )
            lines.append(_line(f"{device.uuid}: {each.name} ({each.pid}{memory}) is {why}", "yellow"))
        if gpu.unaccounted_bytes >= _NOISE_BYTES:
            lines.append(
                _line(
                    f"{device.uuid}: unaccounted memory: {_gib(gpu.unaccounted_bytes)}, of processes that cannot be "
                    "seen from this container",
                    "yellow",
                )
            )
    return lines


def _lost_class(devices: Sequence[Device]) -> list[RenderableType]:
    """A line for each process whose best effort is in part not held back, because a class was not given."""
    lines: list[RenderableType] = []
    told: set[tuple[int, int, str]] = set()
    for client in (client for device in devices for client in device.clients):
        key = (client.process, client.pid, client.name)
        if client.normal_beside_best_effort == 0 or key in told:
            continue
        told.add(key)
        count = client.normal_beside_best_effort
        lines.append(
            _line(
                f"{client.name} ({client.pid}): {count} launch{'es' if count != 1 else ''} went as normal on streams "
                "that best effort uses, and may have let it past the gate: give each class streams of its own",
                "yellow",
            )
        )
    return lines


def _parked(devices: Sequence[Device]) -> list[RenderableType]:
    """A line for each process and GPU whose memory is away."""
    return [
        _line(f"{client.name} ({client.pid}): parked, {_size(client.memory_away_bytes)} are in the host's memory")
        for device in devices
        for client in device.clients
        if client.memory_away_bytes
    ]


def _pools(devices: Sequence[Device]) -> list[RenderableType]:
    """A line for each process and GPU with pools of memory: how much is free, and how scattered that is."""
    return [
        _line(
            f"{client.name} ({client.pid}): {_size(client.pool_reserved_bytes)} in pools, of which "
            f"{_size(client.pool_allocated_bytes)} are allocated; largest free block "
            f"{_size(client.pool_largest_free_bytes)}, fragmentation {client.pool_fragmentation:.2f}"
        )
        for device in devices
        for client in device.clients
        if client.pool_reserved_bytes
    ]


_LONG_GRAPH_MS = 0.2
"""A shorter graph delays no one by much: slices are about so long."""


def _whole_graphs(devices: Sequence[Device]) -> list[RenderableType]:
    """A line for each process and reason for which best-effort graphs stay whole that a request may wait for."""
    lines: list[RenderableType] = []
    clients = [client for device in devices for client in device.clients if client.client_class == "best_effort"]
    for key, client in {(client.process, client.pid, client.name): client for client in clients}.items():
        for reason, whole in sorted(client.whole_graphs.items()):
            if whole.longest_ms < _LONG_GRAPH_MS:
                continue
            graphs = f"{whole.graphs} graph{'s are' if whole.graphs != 1 else ' is'} launched whole"
            change = f": {GRAPH_CHANGES[reason]}" if reason in GRAPH_CHANGES else ""
            lines.append(
                _line(
                    f"{key[2]} ({key[1]}): {graphs}, up to {_time(whole.longest_ms)} and {whole.longest_nodes} nodes, "
                    f"for the reason {reason}{change} (docs/graphs.md)",
                    "yellow",
                )
            )
    return lines


_NOT_INTERRUPTED = {
    "off": "its setting time_slice_us is off",
    "mps": "all MPS clients share one time slice",
    "shared": "its process has latency work, too",
    "unseen": "its contexts were not seen: start it with `cudasched run`, or import cudasched before CUDA begins",
    "refused": "the driver refuses it",
    "closed": "the program has closed files of the driver",
    "tool": "a debugger, sanitizer or profiler is in the program",
}


def _time_slices(devices: Sequence[Device]) -> list[RenderableType]:
    """A line for each best-effort process whose kernels the GPU does not interrupt for others."""
    clients = [client for device in devices for client in device.clients if client.time_slice in _NOT_INTERRUPTED]
    return [
        _line(f"{name} ({pid}): its kernels are not interrupted for others: {_NOT_INTERRUPTED[client.time_slice]}")
        for (_, pid, name), client in {(each.process, each.pid, each.name): each for each in clients}.items()
    ]


def _kernels(devices: Sequence[Device]) -> list[RenderableType]:
    """A line for each process with best-effort kernels: what they make of the GPU."""
    lines: list[RenderableType] = []
    clients = [client for device in devices for client in device.clients if client.client_class == "best_effort"]
    for client in {(client.process, client.pid, client.name): client for client in clients}.values():
        kernels = client.kernels
        if kernels.occupancy is None or kernels.sm_utilisation is None or kernels.block_efficiency is None:
            continue
        levels = ", ".join(f"{count} {level}" for level, count in kernels.levels.items() if count)
        lines.append(
            _line(
                f"{client.name} ({client.pid}): {counted(kernels.count, 'kernel', 'kernels')}, by their launch shapes "
                f"on average: occupancy {kernels.occupancy:.0%}, waves full {kernels.sm_utilisation:.0%}, warps full "
                f"{kernels.block_efficiency:.0%}; {levels} (cudasched advise)"
            )
        )
    return lines


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _parts(devices: Sequence[Device], width: int, before: Mapping[str, Mapping[int, int]]) -> list[RenderableType]:
    parts: list[RenderableType] = [_line(f"{device.path}: {device.error}", "red") for device in devices if device.error]
    seen: set[str] = set()
    for device in devices:
        if processes := _processes(device.clients):
            columns = _columns(processes, before.get(device.uuid, {}))
            parts.append(fitted(columns, width, title=f"{device.name or 'GPU'} ({device.uuid})"))
            seen.update(client.client_class for client in device.clients)
    if not seen:
        parts.append(
            _line(f"no clients: no program runs under cudasched (tables in {hook.load_core().run_directory()})")
        )
    parts += _pools(devices)
    parts += _parked(devices)
    parts += _time_slices(devices)
    parts += _kernels(devices)
    parts += _lost_class(devices)
    parts += _whole_graphs(devices)
    parts += _others(devices, _gpus(devices))
    parts += [_line(meaning, "dim") for name, meaning in _CLASSES.items() if name in seen]
    return parts


def _as_json(devices: Sequence[Device]) -> str:
    gpus = _gpus(devices)
    return document(
        "status",
        [
            {
                **asdict(device),
                "path": str(device.path),
                "clients": [{**asdict(client), "coverage": client.coverage} for client in device.clients],
                "gpu": asdict(gpus[device.uuid]) if device.uuid in gpus else None,
            }
            for device in devices
        ],
    )


def show_status(*, as_json: bool, watch: bool) -> int:
    """Prints who is on which GPU.

    Args:
        as_json: One line of JSON (docs/json.md) in place of a table.
        watch: Again each second, until interrupted.

    Returns:
        0, or 1 if a table cannot be read.

    Raises:
        ConfigError: A setting has no meaning.
        HookError: There is no driver; the message says what was searched.
    """
    configure()
    hook.load_core().find_driver()
    console = Console(width=terminal_columns())
    before: dict[str, dict[int, int]] = {}
    devices = status()

    def look(after_s: float) -> None:
        nonlocal before, devices
        before = _launches(devices)
        time.sleep(after_s)
        devices = status()

    try:
        if as_json:
            print(_as_json(devices), flush=True)
            while watch:
                look(_WATCH_S)
                print(_as_json(devices), flush=True)
            return _status_of(devices)
        look(_FIRST_LOOK_S if any(device.clients for device in devices) else 0)
        if watch and console.is_terminal and not console.is_dumb_terminal:
            with Live(Group(*_parts(devices, console.width, before)), console=console, auto_refresh=False) as live:
                while True:
                    look(_WATCH_S)
                    console.width = terminal_columns()
                    live.update(Group(*_parts(devices, console.width, before)), refresh=True)
        while True:  # elsewhere Live would print at the end alone
            for part in _parts(devices, console.width, before):
                console.print(part, soft_wrap=isinstance(part, Text))  # paths stay whole where they are piped
            if not watch:
                break
            sys.stdout.flush()
            look(_WATCH_S)
    except KeyboardInterrupt:
        pass
    return _status_of(devices)


def _status_of(devices: Iterable[Device]) -> int:
    return 1 if any(device.error for device in devices) else 0
