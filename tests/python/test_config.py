"""Precedence, and where a wrong value is said to come from."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cudasched import config
from cudasched.errors import ConfigError
from hypothesis import example, given
from hypothesis import strategies as st
from support import Run

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "client_class": st.sampled_from(["latency", "normal", "best_effort"]),
    "priority": st.integers(-(2**31), 2**31 - 1),
    "slo_ms": st.floats(0.001, 3_600_000),
    "offload": st.booleans(),
    "policy": st.sampled_from(["strict", "slack", "open"]),
    "lead_us": st.floats(0, 3.6e9) | st.just("auto"),
    "max_inflation": st.floats(1.001, 1000),
    "margin_us": st.floats(0, 3.6e9),
    "long_us": st.floats(0, 3.6e9),
    "miss_probability": st.floats(0, 0.999),
    "latency_order": st.sampled_from(["free", "deadline"]),
    "node_priority": st.booleans(),
    "host_backoff_ms": st.floats(0, 3_600_000),
    "linger_us": st.floats(0, 3.6e9),
    "max_idle_hold_ms": st.floats(0.1, 3_600_000),
    "stale_heartbeat_ms": st.floats(1, 3_600_000),
    "turn_ms": st.floats(0.1, 3_600_000),
    "job": st.just("auto") | st.just("off") | st.just("resnet 8"),
    "model": st.just("/models/sm_90.ubj") | st.just("off"),
    "cache_dir": st.just("/var/cache/x") | st.just("off"),
    "run_dir": st.just("/dev/shm/x") | st.just("/tmp/a b"),
    "log": st.sampled_from(["error", "warning", "info", "debug"]),
    "driver": st.just("/usr/lib/libcuda.so.1"),
    "name": st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=63),
}
layer = st.fixed_dictionaries({}, optional=FIELDS)


def _toml(values: dict[str, Any]) -> str:
    def literal(value: object) -> str:
        if isinstance(value, str):
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return str(value).lower() if isinstance(value, bool) else repr(value)

    return "".join(f"{key} = {literal(value)}\n" for key, value in values.items())


def _resolve(
    tmp_path: Path, toml: str = "", arguments: dict[str, Any] | None = None, **variables: str
) -> config.Resolved:
    (tmp_path / "cudasched.toml").write_text(toml, encoding="utf-8")
    return config.resolve(arguments, environment=variables, directory=tmp_path)


def test_every_field_has_a_strategy_and_a_variable() -> None:
    assert set(FIELDS) == set(config.Config.model_fields) == set(config.VARIABLES)


@given(file=layer, environment=layer, arguments=layer)
def test_arguments_before_environment_before_file_before_defaults(
    tmp_path_factory: pytest.TempPathFactory,
    file: dict[str, Any],
    environment: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    directory = tmp_path_factory.mktemp("config")
    variables = {config.VARIABLES[field]: str(value) for field, value in environment.items()}
    resolved = _resolve(directory, _toml(file), arguments, **variables)
    expected = {**file, **environment, **arguments}
    defaults = config.Config().model_dump()
    assert resolved.config.model_dump() == {**defaults, **expected}
    assert set(resolved.origins) == set(expected)
    for field in expected:
        origin = resolved.origins[field]
        if field in arguments:
            assert origin == field
        elif field in environment:
            assert origin == config.VARIABLES[field]
        else:
            assert origin == f"{directory / 'cudasched.toml'}, line {list(file).index(field) + 1}"


@given(values=layer)
def test_the_engine_gets_what_was_set_and_the_model_and_nothing_else(values: dict[str, Any]) -> None:
    resolved = config.resolve(values, environment={}, directory=Path("/nonexistent"))
    environment = resolved.environment()
    assert set(environment) == {config.VARIABLES[field] for field in {*values, "model"}}
    # Resolving what came out gives the same again: `cudasched run` sets it, the program's own import reads it.
    again = config.resolve(environment=environment, directory=Path("/nonexistent"))
    assert again.config == resolved.config
    assert again.environment() == environment


@given(
    value=st.one_of(st.floats(max_value=0), st.just(math.nan), st.just(math.inf), st.text(max_size=5), st.booleans())
)
@example(-1)
@example([1])
def test_no_slo_without_meaning_passes(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^slo_ms = "):
        config.resolve({"slo_ms": value}, environment={}, directory=Path("/nonexistent"))


@given(name=st.text(max_size=20).filter(lambda text: text not in ("latency", "normal", "best_effort", "best-effort")))
def test_no_unknown_class_passes(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown class, known are latency, normal, best-effort"):
        config.parse_class(name)


@given(text=st.text())
@example("slo_ms = ")
@example("[")
@example('x = "')
@example("a.b.c = 1")
@example("slo_ms = 5\nslo_ms = 6")
def test_any_file_is_read_or_refused_by_name(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("config") / "cudasched.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        config.resolve(environment={}, directory=path.parent)
    except ConfigError as error:
        assert str(error).startswith(str(path))


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("slo_ms = -5\n", "line 1: slo_ms = -5: must be greater than"),
        ('\n# a comment\nclass = "latancy"\n', "line 3: class = 'latancy': unknown class, .*did you mean 'latency'"),
        ('client_class = "fast"\n', "line 1: client_class = 'fast'"),
        ("lead_us = 20\npriority = 1.5\n", "line 2: priority = 1.5"),
        ("priority = true\n", "line 1: priority = True"),
        ('slo_ms = "5"\n', "line 1: slo_ms = '5': must be a valid number"),
        ("slo_m = 5\n", "line 1: unknown key 'slo_m'; did you mean 'slo_ms'"),
        ("\n[policies]\nslo_ms = 5\n", "line 2: unknown key 'policies'"),
        ('class = "normal"\nclient_class = "normal"\n', "class and client_class are the same"),
        ("lead_us = 20\nslo_ms = \n", "line 2, key 'slo_ms': not TOML"),
        ('\nname = "never ends\n', "line 2, key 'name': not TOML"),
        ('log = "loud"\n', "line 1: log = 'loud': must be 'error'"),
    ],
)
def test_a_files_error_names_file_line_and_key(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        _resolve(tmp_path, toml)
    assert str(raised.value).startswith(f"{tmp_path / 'cudasched.toml'}, line ")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CUDASCHED_CLASS", "fast"),
        ("CUDASCHED_SLO_MS", "-5"),
        ("CUDASCHED_SLO_MS", "5ms"),
        ("CUDASCHED_PRIORITY", "high"),
        ("CUDASCHED_LEAD_US", "nan"),
        ("CUDASCHED_NAME", "x" * 64),
    ],
)
def test_a_variables_error_names_it(tmp_path: Path, variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable} = '{value}'"):
        _resolve(tmp_path, **{variable: value})


def test_an_arguments_error_names_it_as_the_caller_does() -> None:
    with pytest.raises(ConfigError, match=r"^--slo-ms = -1"):
        config.resolve({"slo_ms": -1}, environment={}, directory=Path("/nonexistent"), option=lambda _: "--slo-ms")
    with pytest.raises(ConfigError, match="unknown setting 'slo'; did you mean 'slo_ms'"):
        config.resolve({"slo": 1}, environment={}, directory=Path("/nonexistent"))


def test_an_empty_variable_is_unset_and_none_is_not_given(tmp_path: Path) -> None:
    resolved = _resolve(tmp_path, "slo_ms = 7", {"slo_ms": None}, CUDASCHED_SLO_MS="")
    assert resolved.config.slo_ms == 7


def test_which_file_holds(tmp_path: Path) -> None:
    work, xdg, named = tmp_path / "work", tmp_path / "xdg", tmp_path / "named.toml"
    work.mkdir()
    (xdg / "cudasched").mkdir(parents=True)
    variables = {"XDG_CONFIG_HOME": str(xdg)}

    def priority() -> int:
        return config.resolve(environment=variables, directory=work).config.priority

    assert priority() == 0
    (xdg / "cudasched" / "config.toml").write_text("priority = 1")
    assert priority() == 1
    (work / "cudasched.toml").write_text("priority = 2")
    assert priority() == 2
    named.write_text("priority = 3")
    variables["CUDASCHED_CONFIG"] = str(named)
    assert priority() == 3
    named.unlink()
    with pytest.raises(ConfigError, match=r"named\.toml: cannot be read"):
        priority()


def test_home_is_where_xdg_is_not_set(tmp_path: Path) -> None:
    (tmp_path / ".config" / "cudasched").mkdir(parents=True)
    (tmp_path / ".config" / "cudasched" / "config.toml").write_text('name = "mine"')
    assert config.resolve(environment={"HOME": str(tmp_path)}, directory=Path("/nonexistent")).config.name == "mine"


def test_relative_paths_belong_to_the_files_directory(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "c.toml").write_text('run_dir = "run"')
    variables = {"CUDASCHED_CONFIG": "etc/c.toml", "CUDASCHED_DRIVER": "lib/libcuda.so.1"}
    resolved = config.resolve(environment=variables, directory=tmp_path)
    assert resolved.config.run_dir == str(tmp_path / "etc" / "run")
    assert resolved.config.driver == str(tmp_path / "lib" / "libcuda.so.1")


def test_import_puts_the_files_settings_into_the_environment(
    tmp_path: Path, no_driver: Path, python: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cudasched.toml").write_text('class = "latency"\nslo_ms = 5\npriority = 3\n')
    monkeypatch.setenv("CUDASCHED_PRIORITY", "4")
    # By libc's getenv, as the engine reads it.
    done = python(
        "import ctypes, cudasched; getenv = ctypes.CDLL(None).getenv; getenv.restype = ctypes.c_char_p;"
        "print(*[getenv(b'CUDASCHED_' + name).decode() for name in (b'CLASS', b'SLO_MS', b'PRIORITY')])"
    )
    assert (done.stdout, done.stderr) == ("latency 5.0 4\n", "")


def test_import_survives_a_bad_setting(tmp_path: Path, no_driver: Path, python: Run) -> None:
    (tmp_path / "cudasched.toml").write_text("slo_ms = -5\n")
    done: subprocess.CompletedProcess[str] = python(
        "import os, cudasched\nwith cudasched.region(): print(os.environ.get('CUDASCHED_SLO_MS'))"
    )
    assert (done.returncode, done.stdout) == (0, "None\n")
    assert "ConfigWarning" in done.stderr and "cudasched.toml, line 1: slo_ms = -5" in done.stderr
