"""The house holds: a room includes only rooms below it, and doors never one another (docs/design.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT

CSRC = ROOT / "csrc"
ROOMS = [
    *("base", "predict", "arbiter", "schedule", "graph", "preempt"),
    *("simulate", "driver", "memory", "telemetry", "queue", "runtime"),
]
"""From the ground up."""
DOORS = ["hook", "bindings", "torch"]
PURE = [room for room in ROOMS[: ROOMS.index("driver")] if room != "preempt"]
#: Without CUDA in a room that has a part with it.
PURE_PART = re.compile(r"memory/layout\.[ch]pp")
#: Beside the rooms: no room includes them, and they include none.
BESIDE = ["kernels", "device_graph"]
#: A library of its own, which no room includes: it answers to CUDA's names, by the hook's table of them.
DOUBLE = "simulated_driver"
STUDIED = {*ROOMS, *DOORS, *BESIDE, DOUBLE}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
SOURCES = {".hpp", ".h", ".cpp", ".c", ".cu", ".cuh", ".S"}


def rooms_below(room: str) -> set[str]:
    if room == DOUBLE:
        return set(ROOMS[: ROOMS.index("driver")])
    if room in BESIDE:
        return set()
    return set(ROOMS) if room in DOORS else set(ROOMS[: ROOMS.index(room)])


def refusal(room: str, target: str) -> str | None:
    """Why a file of `room` may not include `target`; None if it may."""
    if target.startswith(("../", "./")):
        return "relative"
    other = target.split("/")[0]
    if room == DOUBLE and target == "hook/entry_points.hpp":
        return None
    if "/" not in target or other not in STUDIED or other == room or other in rooms_below(room):
        return None
    return f"{other} is no room below {room}"


def sources() -> Iterator[tuple[str, Path]]:
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in SOURCES and path.is_file():
            yield path.relative_to(CSRC).parts[0], path


def includes() -> Iterator[tuple[str, Path, str, str]]:
    for room, path in sources():
        for kind, target in INCLUDE.findall(path.read_text(encoding="utf-8")):
            yield room, path, kind, target


@pytest.mark.parametrize(
    ("room", "target", "allowed"),
    [
        ("runtime", "base/clock.hpp", True),
        ("base", "runtime/engine.hpp", False),
        ("arbiter", "arbiter/table.hpp", True),
        ("arbiter", "schedule/turn.hpp", False),
        ("bindings", "hook/find_driver.h", False),
        ("hook", "bindings/core.hpp", False),
        ("hook", "runtime/engine.hpp", True),
        ("runtime", "hook/find_driver.h", False),
        ("predict", "../base/clock.hpp", False),
        ("hook", "cudasched/engine.h", True),
        ("simulated_driver", "simulate/device.hpp", True),
        ("simulated_driver", "hook/entry_points.hpp", True),
        ("simulated_driver", "hook/guards.hpp", False),
        ("simulated_driver", "driver/driver.hpp", False),
        ("runtime", "simulated_driver/driver.hpp", False),
    ],
)
def test_the_rule(room: str, target: str, allowed: bool) -> None:
    assert (refusal(room, target) is None) == allowed


def test_every_directory_is_a_room_of_the_design() -> None:
    found = {path.name for path in CSRC.iterdir() if path.is_dir()}
    assert {room for room, _ in sources()} <= STUDIED
    assert found <= STUDIED
    assert {"base", "arbiter", "schedule", "runtime", "hook", "bindings"} <= found


def test_includes_go_down() -> None:
    seen = list(includes())
    assert len([entry for entry in seen if "/" in entry[3]]) > 20
    wrong = [
        f"{path.relative_to(ROOT)}: {target}: {why}" for room, path, _, target in seen if (why := refusal(room, target))
    ]
    assert wrong == []


def test_no_pure_room_includes_cuda() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {target}"
        for room, path, _, target in includes()
        if (room in PURE or PURE_PART.fullmatch(path.relative_to(CSRC).as_posix()))
        and re.match(r"(cuda(?!sched/counts)|cupti|nvml|driver_types|driver/)", target)
    ]
    assert wrong == []


def test_targets_link_only_rooms_below() -> None:
    wrong, linked = [], 0
    for path in sorted(CSRC.glob("*/CMakeLists.txt")):
        room = path.parent.name
        for names in re.findall(r"\bROOMS\s+([a-z_ \n]+)\)", path.read_text(encoding="utf-8")):
            linked += len(names.split())
            wrong += [f"{room} links {name}" for name in names.split() if name not in rooms_below(room)]
    assert linked > 5
    assert wrong == []
