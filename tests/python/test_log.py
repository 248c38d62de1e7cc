"""Logs: one form in C++ and in Python, levels, limit, destinations, and nothing on the launch path."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cudasched import log
from program import HOLDING, PATIENT, Stage, eventually, wait_at_the_gate
from support import ROOT, Run

LAUNCHER = Path(__file__).with_name("launcher.py")
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\d+) cudasched: (error|warning|info|debug): (.*)")


class Clock:
    """Moves when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger with a handler of this test's own, as in a program that has not configured logging; pytest has."""
    monkeypatch.setattr(log, "_goes_elsewhere", lambda: False)
    monkeypatch.setattr(log.logger, "handlers", [log.Handler(Clock())])
    before = log.logger.level
    log.logger.setLevel(logging.DEBUG)
    yield log.logger
    log.logger.setLevel(before)


# ---- the form


def test_the_form_is_the_engines() -> None:
    """The same cases are in tests/csrc/base/test_log.cpp, from which they are read: neither can change alone."""
    source = (ROOT / "tests/csrc/base/test_log.cpp").read_text(encoding="utf-8")
    assert r'"2026-11-23T06:00:18.123Z 4711 cudasched: info: text\n"' in source
    assert r'"cudasched: error: a name: ?[2J? and more text, ??2J, \u00e9\n"' in source
    line = log.line_of(logging.INFO, "text", now=1795413618.123999, pid=4711)
    assert line == b"2026-11-23T06:00:18.123Z 4711 cudasched: info: text\n"
    hostile = log.line_of(logging.ERROR, "a name: \x1b[2J\x7f and\nmore\ttext, \x9b2J, \u00e9")
    assert hostile == "cudasched: error: a name: ?[2J? and more text, ??2J, \u00e9\n".encode()
    assert len(log.line_of(logging.WARNING, "x" * 5000)) == 1023
    assert log.line_of(logging.WARNING, "\udc80").endswith(b"?\n")


@pytest.mark.parametrize(
    ("level", "name"), [(50, "error"), (40, "error"), (35, "warning"), (20, "info"), (10, "debug"), (5, "debug")]
)
def test_levels_are_those_of_logging(level: int, name: str) -> None:
    assert log.line_of(level, "text") == f"cudasched: {name}: text\n".encode()


# ---- the limit


def test_some_lines_at_once_and_then_one_an_interval() -> None:
    clock = Clock()
    limit = log.Limit(3, 10.0, clock)
    assert [limit.admit() for _ in range(5)] == [True, True, True, False, False]
    clock.now += 9.9
    assert not limit.admit()
    clock.now += 0.1
    assert limit.admit() and not limit.admit()
    assert (limit.take_left_out(), limit.take_left_out()) == (4, 0)
    clock.now += 1000
    assert [limit.admit() for _ in range(4)] == [True, True, True, False]


def test_a_flood_is_cut_short_and_said(fresh: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(1000):
        fresh.warning("again")
    fresh.error("of another level")
    said = capfd.readouterr().err.splitlines()
    assert said == ["cudasched: warning: again"] * 30 + ["cudasched: error: of another level"]
    clock = fresh.handlers[0]._limits["warning"]._clock  # type: ignore[attr-defined]
    clock.now += 1
    fresh.warning("later")
    assert capfd.readouterr().err.splitlines() == [
        "cudasched: warning: 970 lines were left out here: too many at once",
        "cudasched: warning: later",
    ]


# ---- the logger


def test_records_go_to_standard_error_with_arguments_and_exceptions(
    fresh: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    fresh.info("%s of %d", "one", 2)
    logging.getLogger("cudasched.observe").warning("of a part")
    wrong = logging.LogRecord("cudasched", logging.WARNING, "", 0, "%d", ("no number",), None)
    fresh.handlers[0].emit(wrong)
    try:
        raise ValueError("why")
    except ValueError:
        fresh.exception("failed")
    assert capfd.readouterr().err.splitlines() == [
        "cudasched: info: one of 2",
        "cudasched: warning: of a part",
        "cudasched: warning: '%d' (TypeError: %d format: a real number is required, not str)",
        "cudasched: error: failed (ValueError: why)",
    ]


def test_where_the_program_configures_logging_records_go_there_alone(python: Run, no_driver: Path) -> None:
    code = (
        "import logging, sys, cudasched\n"
        "log = logging.getLogger('cudasched')\n"
        "log.warning('before')\n"
        "logging.basicConfig(stream=sys.stdout, format='%(name)s %(message)s')\n"
        "log.warning('after')\n"
        "log.propagate = False\n"
        "log.warning('not handed on')\n"
    )
    done = python(code)
    assert done.stdout == "cudasched after\n"
    assert done.stderr == "cudasched: warning: before\ncudasched: warning: not handed on\n"


def test_the_level_is_the_settings_until_the_program_sets_another(python: Run, no_driver: Path) -> None:
    code = (
        "import logging, cudasched\n"
        "log = logging.getLogger('cudasched')\n"
        "log.info('one'); log.warning('two'); log.setLevel('DEBUG'); log.debug('three')\n"
        "import cudasched.log; cudasched.log.configure(); print(len(log.handlers), log.level)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CUDASCHED_LOG"}
    done = python(code, env=environment)
    assert done.stderr == "cudasched: warning: two\ncudasched: debug: three\n"
    assert done.stdout == "1 10\n"
    done = python(code, env={**environment, "CUDASCHED_LOG": "info"})
    assert done.stderr.startswith("cudasched: info: one\ncudasched: warning: two\n")


def test_the_level_and_the_file_of_a_settings_file(
    python: Run, no_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings.toml").write_text(f'log = "info"\nlog_file = "{tmp_path}/a.log"\n')
    monkeypatch.setenv("CUDASCHED_CONFIG", str(tmp_path / "settings.toml"))
    done = python("import logging, cudasched; logging.getLogger('cudasched').info('text')")
    assert done.returncode == 0 and done.stderr == ""
    lines = [LINE.fullmatch(line) for line in (tmp_path / "a.log").read_text().splitlines()]
    assert [found and found[3] for found in lines][-1] == "text"


# ---- destinations


def test_engine_and_python_share_a_file(python: Run, simulated: Path, tmp_path: Path) -> None:
    path = tmp_path / "cudasched.log"
    environment = {**os.environ, "CUDASCHED_LOG": "debug", "CUDASCHED_LOG_FILE": str(path)}
    code = "import cudasched, launcher; gpu = launcher.Gpu(); gpu.launch(3); gpu.synchronize()"
    done = python(code, env=environment)
    assert done.returncode == 0 and "cudasched: " not in done.stderr
    lines = [LINE.fullmatch(line) for line in path.read_text().splitlines()]
    assert all(lines)
    said = [found[3] for found in lines if found]
    assert any(text.startswith("hooked the driver at") for text in said)  # the engine
    assert any("stands in front of the driver" in text for text in said)  # the package
    assert len({found[1] for found in lines if found}) == 1
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("path", ["/dev/full", "/nowhere/log", "/", "bad\0name"])
def test_a_file_that_cannot_be_written_leaves_standard_error(
    fresh: logging.Logger, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], path: str
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDASCHED_LOG_FILE": path})
    fresh.warning("text")
    assert capfd.readouterr().err == "cudasched: warning: text\n"


def test_a_child_of_fork_writes_under_its_own_number(
    fresh: logging.Logger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDASCHED_LOG_FILE", str(tmp_path / "log"))
    fresh.warning("parent")
    child = os.fork()
    if child == 0:
        fresh.warning("child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    lines = [LINE.fullmatch(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(found[1], found[3]) for found in lines if found] == [
        (str(os.getpid()), "parent"),
        (str(child), "child"),
    ]


@pytest.mark.parametrize("spoil", ["os.close(2)", "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"])
def test_a_spoilt_standard_error_ends_no_program(python: Run, no_driver: Path, spoil: str) -> None:
    code = f"import logging, os, cudasched\n{spoil}\nlogging.getLogger('cudasched').error('x')\nprint('on')"
    done = python(code)
    assert (done.returncode, done.stdout) == (0, "on\n")


def test_a_reader_that_has_left_ends_no_hooked_program(python: Run, simulated: Path) -> None:
    """Python ignores SIGPIPE; a C program does not, so it is set back here."""
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "ends = os.pipe(); os.dup2(ends[1], 2); os.close(ends[0])\n"
        "import cudasched, launcher; gpu = launcher.Gpu(); gpu.launch(3); gpu.synchronize(); print('on')"
    )
    done = python(code, env={**os.environ, "CUDASCHED_LOG": "debug"})
    assert (done.returncode, done.stdout) == (0, "on\n")


# ---- the launch path


@pytest.mark.parametrize("client_class", ["latency", "normal", "best_effort"])
def test_no_level_makes_launches_write_lines(
    cudasched: Run, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client_class: str
) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_SCALE", "1")

    def lines(launches: int) -> list[str]:
        path = tmp_path / f"{launches}.log"
        monkeypatch.setenv("CUDASCHED_LOG", "debug")
        monkeypatch.setenv("CUDASCHED_LOG_FILE", str(path))
        done = cudasched("run", "--class", client_class, "--", sys.executable, str(LAUNCHER), str(launches))
        assert done.returncode == 0, done.stderr
        found = [LINE.fullmatch(line) for line in path.read_text().splitlines()]
        texts = [re.sub(r"\d+", "N", each[3]) for each in found if each]
        sums = [text for text in texts if text.startswith(("the gate held", "the ring was drained"))]
        assert len(sums) <= 20  # one a second of each
        return sorted(text for text in texts if text not in sums)

    assert lines(3) == lines(2000)


# ---- single decisions ------------------------------------------------------------------------------------------------


def test_the_core_says_at_debug_what_held_launches_and_drained_the_ring(stage: Stage) -> None:
    serve = stage.importing(CUDASCHED_CLASS="latency", **PATIENT, **HOLDING)
    serve.call("gpu = Gpu(); gpu.launch(); gpu.synchronize()")
    train = stage.run("best-effort", **PATIENT, CUDASCHED_LOG="debug")
    train.call("gpu = Gpu(); gpu.launch(3); gpu.synchronize()")
    serve.call("region = cudasched.region('latency'); region.__enter__(); gpu.launch()")
    train.send("gpu.launch(5) and None or gpu.synchronize()")
    wait_at_the_gate(train)
    serve.call("region.__exit__(None, None, None); gpu.synchronize()")
    train.answer()
    eventually(lambda: "the gate held launches: " in train.stderr, "the gate is spoken of")
    eventually(lambda: "the ring was drained: " in train.stderr, "the ring is spoken of")
    eventually(lambda: "for latency work" in train.stderr, "why is said")
    assert "calls that wait for the GPU" in train.stderr


def test_the_core_says_at_debug_why_launches_are_not_offloaded(stage: Stage) -> None:
    for variables, why in (
        ({"CUDASCHED_OFFLOAD": "0"}, "the setting offload is off"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING is 1"),
    ):
        train = stage.run("best-effort", CUDASCHED_LOG="debug", **variables)
        train.call("gpu = Gpu(); gpu.launch(); gpu.synchronize()")
        assert f"launches are not offloaded: {why}" in train.stderr
