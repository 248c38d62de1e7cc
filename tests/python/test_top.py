"""`cudasched top`: what it makes of two looks, and the program itself in a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from cudasched import control
from cudasched.observe._gpus import Foreign, Gpu
from cudasched.observe._metrics import Device, Metrics, Predictions, Process, RegionMetrics, Times
from cudasched.observe._rates import Look, Row, rows
from cudasched.status import Client
from support import PATIENCE_S, Run, filled

pytest.importorskip("textual")
pyte = pytest.importorskip("pyte")

from cudasched.observe.top import Top, columns_of  # noqa: E402

NOTHING = Times((0,) * 98)
CLIENT = filled(
    Client,
    pid=7,
    name="serve.py",
    client_class="latency",
    priority=2,
    slo_ms=5.0,
    alive=True,
    hook_attached=True,
    age_s=1,
    in_flight_ms=0.25,
    launches=3,
    process=9,
    version="0",
    memory_bytes=3 << 30,
)
METRICS = filled(
    Metrics,
    launches={"normal": 0, "latency": 100, "best_effort": 0},
    gate_wait=NOTHING,
    queue_wait=NOTHING,
    preemption=NOTHING,
    latency_active_s=1.0,
    predictions=Predictions(),
    regions=(RegionMetrics("search", 5.0, 10, 10, NOTHING),),
)
ROW = filled(Row, classes=("latency",))
PROCESS = Process(9, 7, "serve.py", "0", METRICS, (("GPU-1", CLIENT),))


def test_a_client_that_misses_every_target_is_first_by_targets() -> None:
    """Guards against a share of 0 that sorted as no share at all: behind the clients that keep all."""
    rows_by_share = {share: replace(ROW, attainment=share) for share in (1.0, None, 0.0, 0.5)}
    column = next(column for column in columns_of([], 200) if column.title == "in SLO %")
    assert column.descends
    by_need = sorted(rows_by_share, key=lambda share: column.order(rows_by_share[share]), reverse=True)
    assert by_need == [0.0, 0.5, 1.0, None]


def at(second: float, *processes: Process) -> Look:
    return Look(second, (Device("GPU-1", "H200"),), processes)


@pytest.mark.parametrize("width", [40, 75, 80, 100, 132, 200])
def test_no_column_is_cut_off(width: int) -> None:
    """Guards against columns that a width had room for by their titles, and not by their cells."""
    long = Row(
        1,
        1234567,
        "a" * 40,
        ("latency", "best_effort"),
        5,
        "overdue 12345 s",
        1.0,
        1.0,
        1.0,
        123456.0,
        1234.5,
        12345.6,
        1.0,
        1e4,
        123.0,
        123456,
    )
    shown = columns_of([long], width)
    taken = sum(2 + max(len(column.title), len(column.text(long))) for column in shown)
    assert taken <= width or all(column.rank == 0 for column in shown)
    assert {column.title for column in shown} >= {"pid", "name", "class", "GPU %"}
    assert len(columns_of([], width)) >= len(shown)


def test_rates_are_of_the_time_between_two_looks() -> None:
    times = Times((0,) * 20 + (4,) + (0,) * 77, 0.1)
    region = RegionMetrics("search", 5.0, 19, 11, times)
    later = replace(
        METRICS, launches={"normal": 0, "latency": 150, "best_effort": 0}, latency_active_s=1.5, regions=(region,)
    )
    (row,) = rows(at(12.0, replace(PROCESS, metrics=later)), at(10.0, PROCESS))
    assert (row.best_effort_ratio, row.closed_ratio, row.launches_per_s, row.attainment) == (0.0, 0.25, 25.0, 0.9)
    assert row.request_ms is not None and row.gate_wait_ms is None
    assert row.memory_bytes == 3 << 30
    assert (row.slo_ms, row.in_flight_ms, row.state, row.classes, row.priority) == (5.0, 0.25, "idle", ("latency",), 2)


def test_the_first_look_has_no_rates_and_a_silent_process_no_metrics() -> None:
    first, silent = rows(at(1.0, PROCESS, replace(PROCESS, number=0, metrics=None)), None)
    assert (first.closed_ratio, first.launches_per_s, first.attainment) == (None, None, 0.5)
    assert (silent.closed_ratio, silent.attainment, silent.slo_ms) == (None, None, 5.0)


def test_a_process_that_came_or_began_anew_has_no_negative_rates() -> None:
    before = replace(PROCESS, metrics=replace(METRICS, launches={"latency": 900}, latency_active_s=9.0))
    (row,) = rows(at(2.0, PROCESS), at(1.0, before))
    assert (row.closed_ratio, row.launches_per_s) == (0.0, 0.0)
    (came,) = rows(at(2.0, replace(PROCESS, number=10)), at(1.0, PROCESS))
    assert came.closed_ratio is None


def test_gpu_time_is_the_drivers_samples_whatever_the_class() -> None:
    """Guards against a busy `normal` program at 0%, and against predicted time in the place of time received."""
    clients = (*PROCESS.clients, ("GPU-1", replace(CLIENT, client_class="normal")), ("GPU-2", CLIENT))
    look = Look(
        2.0,
        (
            Device("GPU-1", "H200", gpu=Gpu("GPU-1", sm_ratios={7: 0.5, 8: 0.25})),
            Device("GPU-2", "H200", gpu=Gpu("GPU-2", sm_ratios={7: 0.25})),
            Device("GPU-3", "H200"),
        ),
        (
            replace(PROCESS, clients=clients),
            replace(PROCESS, number=10, pid=8),
            replace(PROCESS, number=11, pid=9),
            replace(PROCESS, number=12, clients=(("GPU-3", CLIENT),)),
        ),
    )
    assert [row.sm_ratio for row in rows(look, None)] == [0.75, 0.25, None, None]


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"active": True}, "active"),
        ({"waiting": True}, "waiting"),
        ({"overdue_s": 12.3, "active": True}, "overdue 12 s"),
    ],
)
def test_states(fields: dict[str, object], state: str) -> None:
    client = replace(CLIENT, **fields)  # type: ignore[arg-type]
    found: list[Row] = rows(at(1.0, replace(PROCESS, clients=(("GPU-1", client),))), None)
    assert found[0].state == state


WORKS = """
import sys, threading, cudasched, launcher
gpu = launcher.Gpu()
if sys.argv[1] == "region":
    with cudasched.region("latency"):
        gpu.launch()
        gpu.synchronize()
else:
    cudasched.set_class(sys.argv[1])
ended = threading.Event()
gpu.launch()
gpu.synchronize()
print("ready", flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.wait(0.02):
    gpu.launch(2)
    gpu.synchronize()
"""


@contextmanager
def client(name: str, client_class: str) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-c", WORKS, client_class],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDASCHED_NAME": name},
    ) as running:
        assert running.stdin and running.stdout and running.stdout.readline() == "ready\n"
        yield
        running.stdin.close()


def _size(terminal: int, columns: int, lines: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


class Terminal:
    """A program in a terminal of its own, and what its screen shows."""

    def __init__(self, command: list[str], columns: int, lines: int = 24, **environment: str) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            _size(0, columns, lines)
            inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            os.execvpe(command[0], command, {**inherited, "TERM": "xterm-256color", **environment})

    def _read(self) -> bool:
        if not select.select([self._terminal], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:
            return False
        # What pyte does not know of newer terminals: private modes with parameters of the kitty keyboard protocol.
        self._stream.feed(data.replace(b"\x1b[>1u", b"").replace(b"\x1b[<u", b"").replace(b"\x1b[=0;1u", b""))
        return bool(data)

    def text(self) -> str:
        return "\n".join(self.screen.display)

    def until(self, seen: Callable[[str], bool]) -> str:
        limit = time.monotonic() + PATIENCE_S
        while not seen(self.text()):
            assert self._read() and time.monotonic() < limit, self.text()
        return self.text()

    def keys(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def resize(self, columns: int, lines: int = 24) -> None:
        self.screen.resize(lines, columns)
        _size(self._terminal, columns, lines)

    def end(self) -> int:
        while self._read():
            pass
        _, status = os.waitpid(self._pid, 0)
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(status)


def test_in_a_terminal_wide_and_narrow(simulated: Path, quick_device: None, command: str) -> None:
    with client("serve.py", "latency"), client("train.py", "best_effort"):
        terminal = Terminal([command, "top", "--interval-s", "0.2"], 190)
        both = lambda text: "serve.py" in text and "train.py" in text  # noqa: E731
        wide = terminal.until(lambda text: both(text) and "past gate" in text and "by GPU %, descending" in text)
        for title in ("pid", "name", "class", "GPU %", "state", "in SLO %", "GiB", "P99 ms", "launches/s", "prio"):
            assert title in wide, title
        assert "best_effort" in wide, "as it is called everywhere"
        # The next column sorts, the other way round, and what is shown stays.
        terminal.keys("s")
        terminal.until(lambda text: "by state, ascending" in text)
        terminal.keys("r")
        terminal.until(lambda text: "by state, descending" in text)
        terminal.keys(" ")
        terminal.until(lambda text: "PAUSED" in text)
        terminal.resize(50)
        narrow = terminal.until(lambda text: "past gate" not in text and both(text) and "GPU %" in text)
        assert "P99" not in narrow
        terminal.keys("q")
        assert terminal.end() == 0


def test_keys_change_the_chosen_client(simulated: Path, quick_device: None, command: str) -> None:
    with client("train.py", "best_effort"):
        terminal = Terminal([command, "top", "--interval-s", "0.2"], 200)
        terminal.until(lambda text: "train.py" in text and "strict" in text)
        for key, said, holds in (
            ("l", "class latency", lambda found: found.client_class == "latency"),
            ("b", "class best_effort", lambda found: found.client_class == "best_effort"),
            ("+", "priority 1", lambda found: found.priority == 1),
            ("-", "priority 0", lambda found: found.priority == 0),
            ("w", "weight 2", lambda found: found.weight == 2.0),
            ("W", "weight 1", lambda found: found.weight == 1.0),
            ("p", "policy slack", lambda found: found.policy == "slack"),
        ):
            terminal.keys(key)
            line = re.compile(rf"train\.py \(\d+\): {said} *$", re.MULTILINE)  # once it is no longer only asked
            terminal.until(lambda text, line=line: line.search(text) is not None)  # type: ignore[misc]
            (found,) = control.clients()
            assert holds(found), (key, found)
        terminal.until(lambda text: re.search(r"\bslack\b.*\n", text.partition("past gate")[2]) is not None)
        terminal.keys("q")
        assert terminal.end() == 0


def test_a_refusal_is_said_and_the_screen_goes_on(simulated: Path, quick_device: None, command: str) -> None:
    with client("serve.py", "region"):
        terminal = Terminal([command, "top", "--interval-s", "0.2"], 120)
        terminal.until(lambda text: "serve.py" in text)
        terminal.keys("b")
        terminal.until(lambda text: "regions decide the class" in text)
        terminal.keys("q")
        assert terminal.end() == 0


def test_many_programs_without_cudasched_leave_room_for_the_clients() -> None:
    """Guards against a line for each of them, which pushed the table off the screen."""
    foreign = tuple(Foreign(pid, f"notebook{pid}", None, elsewhere=pid == 139) for pid in range(100, 140))
    top = Top()
    top._now = Look(1.0, (Device("GPU-1", "H200", gpu=Gpu("GPU-1", foreign=foreign)),), (PROCESS,))
    top._rows = rows(top._now, None)
    text = top._summary().plain
    assert "notebook100 (100) is not under cudasched" in text and "and 36 more programs" in text
    assert "notebook139 (139) is with another run directory" in text, "what can be mended comes first"
    assert len(text.splitlines()) < 10


def test_without_colour(simulated: Path, quick_device: None, command: str) -> None:
    with client("serve.py", "latency"):
        terminal = Terminal([command, "top", "--interval-s", "0.2"], 80, NO_COLOR="1")
        terminal.until(lambda text: "serve.py" in text)
        terminal.keys("q")
        assert terminal.end() == 0
        shades = {cell.fg for line in terminal.screen.buffer.values() for cell in line.values()}
        assert all(_is_grey(shade) for shade in shades), shades


def _is_grey(shade: str) -> bool:
    if len(shade) == 6 and all(digit in "0123456789abcdef" for digit in shade):
        return shade[:2] == shade[2:4] == shade[4:]
    return shade in ("default", "black", "white", "brightblack", "brightwhite")


def test_who_else_is_on_the_gpu_is_named(
    simulated: Path,
    quick_device: None,
    command: str,
    nvml: Callable[..., None],
) -> None:
    unseen = 2**22 + 1  # of a pid namespace that this process does not see
    with client("serve.py", "latency"), subprocess.Popen(["sleep", "1000"]) as plain:
        nvml((plain.pid, 3 << 30), (unseen, 4 << 30), used=10 << 30)
        terminal = Terminal([command, "top", "--interval-s", "0.2"], 100)
        terminal.until(
            lambda text: (
                "serve.py" in text
                and "93% busy  10.0 of 80 GiB" in text
                and f"sleep ({plain.pid}) is not under cudasched" in text
                and "unaccounted memory: 4.0 GiB" in text
            )
        )
        terminal.keys("q")
        assert terminal.end() == 0
        plain.kill()


def test_nobody_there_is_said(simulated: Path, command: str) -> None:
    terminal = Terminal([command, "top"], 80)
    terminal.until(lambda text: "no clients: no program runs under cudasched" in text)
    terminal.keys("q")
    assert terminal.end() == 0


def test_elsewhere_than_in_a_terminal(cudasched: Run) -> None:
    done = cudasched("top")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "cudasched: error: `cudasched top` needs a terminal; `cudasched status --json` is for programs\n"
    )
