"""`cudasched status`: who is on which GPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cudasched import hook
from cudasched.cli.run import configure
from cudasched.errors import HookError
from cudasched.status import Client, Device, status

__all__ = ["show_status"]

_WATCH_S = 1.0
_PIPE_COLUMNS = 200
_OVERDUE_S = 1.0
"""A launch that is later than that, whatever was predicted, may never end."""

_COLUMNS = {
    "GPU": False,
    "slot": True,
    "pid": True,
    "name": False,
    "class": False,
    "prio": True,
    "SLO ms": True,
    "state": False,
    "regions": True,
    "in flight ms": True,
    "launches": True,
    "coverage": True,
    "heartbeat": True,
}
"""Title of each column, and whether it holds numbers."""


def _state(client: Client) -> str:
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
    return "idle" if client.hook_attached else "not hooked"


def _row(device: Device, client: Client) -> list[Text]:
    cells = [
        device.name or device.uuid,
        str(client.slot),
        str(client.pid),
        client.name,
        client.client_class,
        str(client.priority),
        "-" if client.slo_ms is None else f"{client.slo_ms:g}",
        _state(client),
        str(client.regions),
        f"{client.in_flight_ms:.3f}",
        str(client.launches),
        "-" if client.coverage is None else f"{100 * client.coverage:.2f} %",
        f"{client.heartbeat_age_s:.1f} s",
    ]
    return [Text(cell) for cell in cells]


def _picture(devices: Sequence[Device]) -> RenderableType:
    parts: list[RenderableType] = [
        Text(f"{device.path}: {device.error}", style="red") for device in devices if device.error
    ]
    if any(device.clients for device in devices):
        table = Table()
        for title, number in _COLUMNS.items():
            table.add_column(title, justify="right" if number else "left")
        for device in devices:
            for client in device.clients:
                table.add_row(*_row(device, client))
        parts.append(table)
    else:
        parts.append(
            Text(f"no clients: no program runs under cudasched (tables in {hook.load_core().run_directory()})")
        )
    return Group(*parts)


def _as_json(devices: Sequence[Device]) -> str:
    return json.dumps(
        [
            {
                **asdict(device),
                "path": str(device.path),
                "clients": [{**asdict(client), "coverage": client.coverage} for client in device.clients],
            }
            for device in devices
        ]
    )


def show_status(*, as_json: bool, watch: bool) -> int:
    """Prints who is on which GPU.

    Args:
        as_json: One line of JSON, a list of `cudasched.status.Device`, in place of a table.
        watch: Again each second, until interrupted.

    Returns:
        0, or 1 if a table cannot be read.

    Raises:
        ConfigError: A setting has no meaning.
        HookError: There is no driver; the message says what was searched.
    """
    configure()
    core = hook.load_core()
    try:
        core.find_driver()
    except HookError as error:
        raise HookError(f"no NVIDIA driver found: {error}") from None
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    devices = status()
    try:
        if as_json:
            print(_as_json(devices), flush=True)
            while watch:
                time.sleep(_WATCH_S)
                devices = status()
                print(_as_json(devices), flush=True)
        elif watch:
            with Live(_picture(devices), console=console, auto_refresh=False) as live:
                while True:
                    time.sleep(_WATCH_S)
                    devices = status()
                    live.update(_picture(devices), refresh=True)
        else:
            console.print(_picture(devices))
    except KeyboardInterrupt:
        pass
    return 1 if any(device.error for device in devices) else 0
