"""Precedence, and where a wrong value is said to come from."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cudasched import config
from cudasched.errors import ConfigError
from hypothesis import example, given
from hypothesis import strategies as st
from support import Run

TEXTS = {"name": st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=63)}


def _values(field: str, setting: config.Setting) -> st.SearchStrategy[Any]:
    least, most = setting.least, setting.most
    of_kind: dict[str, st.SearchStrategy[Any]] = {
        "switch": st.booleans(),
        "integer": st.integers(int(least), int(most)),
        "number": st.floats(least, most),
        "size": st.integers(int(least), int(most)) | st.just(0),
        "text": TEXTS.get(field, st.sampled_from(["auto", "off", "resnet 8"])),
        "path": st.sampled_from(["off", "/var/cache/x", "/tmp/a b"]),
    }
    words = st.sampled_from(setting.words) if setting.words else st.nothing()
    return words | of_kind.get(setting.kind, st.nothing())


FIELDS = {field: _values(field, config.settings()[field]) for field in config.VARIABLES}
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


@given(file=layer, environment=layer, arguments=layer)
def test_arguments_before_environment_before_file_before_defaults(
    tmp_path_factory: pytest.TempPathFactory,
    file: dict[str, Any],
    environment: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    directory = tmp_path_factory.mktemp("config")
    variables = {config.VARIABLES[field]: str(value) for field, value in environment.items()}
    variables["CUDASCHED_CONFIG"] = "cudasched.toml"  # named, so that it may set paths
    resolved = _resolve(directory, _toml(file), arguments, **variables)
    expected = {**file, **environment, **arguments}
    defaults = vars(config.Config())
    assert vars(resolved.config) == {**defaults, **expected}
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


def test_a_size_is_a_number_with_a_unit() -> None:
    resolved = config.resolve({"memory_limit": "20GiB"}, environment={}, directory=Path("/nonexistent"))
    assert resolved.config.memory_limit == 20 << 30
    assert resolved.environment()["CUDASCHED_MEMORY_LIMIT"] == str(20 << 30)
    with pytest.raises(ConfigError, match=r"^memory_limit = .*such as 20GiB"):
        config.resolve({"memory_limit": "20"}, environment={}, directory=Path("/nonexistent"))


@given(
    value=st.one_of(
        st.floats(max_value=0),
        st.just(math.nan),
        st.just(math.inf),
        st.text(max_size=5).filter(lambda text: text != "none"),
        st.booleans(),
    )
)
@example(-1)
@example([1])
def test_no_slo_without_meaning_passes(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^slo_ms = "):
        config.resolve({"slo_ms": value}, environment={}, directory=Path("/nonexistent"))


@given(name=st.text(max_size=20).filter(lambda text: text not in ("latency", "normal", "best_effort", "best-effort")))
def test_no_unknown_class_passes(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown class, known are normal, latency, best_effort"):
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
        ("slo_ms = -5\n", "line 1: slo_ms = -5: must be a number of ms, from 0.001 to"),
        ('\n# a comment\nclass = "latancy"\n', "line 3: class = 'latancy': unknown class, .*did you mean 'latency'"),
        ('client_class = "fast"\n', "line 1: client_class = 'fast'"),
        ("lead_us = 20\npriority = 1.5\n", "line 2: priority = 1.5"),
        ("priority = true\n", "line 1: priority = True"),
        ('slo_ms = "5"\n', "line 1: slo_ms = '5': must be a number of ms"),
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


@pytest.mark.parametrize("field", ["slo_ms", "max_inflation", "memory_turn_ms"])
def test_a_file_may_say_that_a_number_is_none(tmp_path: Path, field: str) -> None:
    resolved = _resolve(tmp_path, f'{field} = "none"', {})
    assert getattr(resolved.config, field) is None and not resolved.notes
    assert config.VARIABLES[field] not in resolved.environment()


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


# ---- files that were found, and not named


@pytest.fixture
def as_another(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a file another user's: by its owner for root, else by who this process is."""

    def give_away(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 54321, 54321, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 54321)

    return give_away


def _found(directory: Path, text: str = "priority = 2\n", **variables: str) -> config.Resolved:
    (directory / "cudasched.toml").write_text(text)
    return config.resolve(environment=variables, directory=directory)


def test_a_found_file_of_another_user_is_not_read(tmp_path: Path, as_another: Callable[[Path], None]) -> None:
    (tmp_path / "cudasched.toml").write_text("priority = 2\n")
    as_another(tmp_path / "cudasched.toml")
    resolved = config.resolve(environment={}, directory=tmp_path)
    assert (resolved.config.priority, dict(resolved.origins)) == (0, {})
    (note,) = resolved.notes
    assert note.startswith(f"{tmp_path / 'cudasched.toml'} is not read: it belongs to user 54321")
    assert f"set CUDASCHED_CONFIG={tmp_path / 'cudasched.toml'}" in note
    named = {"CUDASCHED_CONFIG": "cudasched.toml"}
    assert config.resolve(environment=named, directory=tmp_path).config.priority == 2


def test_a_found_file_that_everyone_may_write_to_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "cudasched.toml").write_text("priority = 2\n")
    (tmp_path / "cudasched.toml").chmod(0o666)
    resolved = config.resolve(environment={}, directory=tmp_path)
    assert resolved.config.priority == 0 and "everyone may write to it" in resolved.notes[0]


def test_a_found_file_in_a_directory_of_everyone_is_read_only_if_that_is_sticky(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    resolved = _found(shared)
    assert resolved.config.priority == 0 and "everyone may put files into" in resolved.notes[0]
    shared.chmod(0o1777)
    assert _found(shared).config.priority == 2


def test_a_link_of_another_user_is_not_followed(tmp_path: Path, as_another: Callable[[Path], None]) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make another user's link to a file of one's own")
    (tmp_path / "mine.toml").write_text("priority = 2\n")
    (tmp_path / "cudasched.toml").symlink_to("mine.toml")
    assert config.resolve(environment={}, directory=tmp_path).config.priority == 2
    as_another(tmp_path / "cudasched.toml")
    resolved = config.resolve(environment={}, directory=tmp_path)
    assert resolved.config.priority == 0 and "its link belongs to user 54321" in resolved.notes[0]


@pytest.mark.parametrize("key", [key for key in config.VARIABLES if config.settings()[key].kind == "path"])
def test_a_file_in_the_working_directory_sets_no_paths(tmp_path: Path, key: str) -> None:
    text = f'priority = 2\n{key} = "/somewhere/evil.so"\n'
    resolved = _found(tmp_path, text)
    assert resolved.config.priority == 2 and key not in resolved.origins
    (note,) = resolved.notes
    assert note.startswith(f"{tmp_path / 'cudasched.toml'}, line 2: {key} is ignored")
    assert f"CUDASCHED_CONFIG={tmp_path / 'cudasched.toml'}" in note and config.VARIABLES[key] in note
    own = tmp_path / "xdg" / "cudasched"
    own.mkdir(parents=True)
    (own / "config.toml").write_text(text)
    (tmp_path / "cudasched.toml").unlink()
    resolved = config.resolve(environment={"XDG_CONFIG_HOME": str(tmp_path / "xdg")}, directory=tmp_path)
    assert getattr(resolved.config, key) == "/somewhere/evil.so" and not resolved.notes


def test_the_users_own_directory_is_looked_at_too(tmp_path: Path, as_another: Callable[[Path], None]) -> None:
    own = tmp_path / "xdg" / "cudasched"
    own.mkdir(parents=True)
    (own / "config.toml").write_text('driver = "/evil.so"\n')
    as_another(own / "config.toml")
    resolved = config.resolve(environment={"XDG_CONFIG_HOME": str(tmp_path / "xdg")}, directory=tmp_path)
    assert resolved.config.driver is None and "is not read" in resolved.notes[0]


def test_a_foreign_driver_is_not_loaded_by_the_import(
    tmp_path: Path, python: Run, cudasched: Run, as_another: Callable[[Path], None]
) -> None:
    (tmp_path / "cudasched.toml").write_text('driver = "/somewhere/evil.so"\n')
    done = python("import os, cudasched; print(os.environ.get('CUDASCHED_DRIVER'))")
    assert (done.returncode, done.stdout) == (0, "None\n")
    assert "ConfigWarning" in done.stderr and "line 1: driver is ignored" in done.stderr
    done = cudasched("run", "--", "sh", "-c", "echo $CUDASCHED_DRIVER")
    assert (done.returncode, done.stdout) == (0, "\n")
    assert "cudasched: warning:" in done.stderr and "line 1: driver is ignored" in done.stderr


# ---- whatever stands in a file, importing goes on


@pytest.mark.parametrize(
    "text",
    [
        "priority = " + "9" * 5000,
        "priority = 0x" + "f" * 5000,
        "slo_ms = 0x" + "f" * 5000,
        "a = " + "[" * 20000,
        "a = " + "{b=" * 10000,
        "class = [" + "1," * 5000 + "]",
        "x" * 70_000,
        'class = "\\u001b[2J"',
        "class = 1979-05-27",
        '"\\n\\u001b]0;x" = 1',
    ],
    ids=range(10),
)
def test_no_file_ends_the_import_or_reaches_the_terminal(
    tmp_path: Path, no_driver: Path, python: Run, cudasched: Run, text: str
) -> None:
    (tmp_path / "cudasched.toml").write_text(text)
    done = python("import cudasched; print('on')")
    assert (done.returncode, done.stdout) == (0, "on\n"), done.stderr
    assert "ConfigWarning" in done.stderr and "Traceback" not in done.stderr and "\x1b" not in done.stderr
    done = cudasched("run", "--", "true")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "\x1b" not in done.stderr
    assert len(done.stderr) < 1000


# ---- one definition for an option, a variable and a file; what has no effect is said


@pytest.mark.parametrize("word", ["1", "true", "yes", "on", "ON", "0", "false", "no", "Off"])
def test_a_switch_is_spelt_as_one_likes(tmp_path: Path, word: str, python: Run, simulated: Path) -> None:
    wanted = word.lower() in ("1", "true", "yes", "on")
    assert config.resolve(environment={"CUDASCHED_OFFLOAD": word}, directory=tmp_path).config.offload is wanted
    assert config.switched_off({"CUDASCHED_OFF": word}) is wanted
    code = (
        "import os, sys; os.environ['CUDASCHED_OFF'] = sys.argv[1]; import cudasched; print(cudasched.hook.installed())"
    )
    assert python(code, word).stdout == f"{not wanted}\n"


def test_a_switch_that_means_nothing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^CUDASCHED_OFF = 'maybe': must be on or off"):
        config.resolve(environment={"CUDASCHED_OFF": "maybe"}, directory=tmp_path)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"CUDASCHED_SLO_MS": "5"}, "CUDASCHED_SLO_MS: slo_ms = 5.0 has no effect: only class latency"),
        ({"CUDASCHED_SLO_MS": "5", "CUDASCHED_CLASS": "latency"}, ""),
        ({"CUDASCHED_MARGIN_US": "5"}, "margin_us = 5.0 has no effect"),
        ({"CUDASCHED_MARGIN_US": "5", "CUDASCHED_POLICY": "slack"}, ""),
        ({"CUDASCHED_HOST_BOUND_INFLATION": "1.05"}, "host_bound_inflation = 1.05 has no effect"),
        ({"CUDASCHED_HOST_BOUND_INFLATION": "1.05", "CUDASCHED_POLICY": "slack"}, ""),
        ({"CUDASCHED_HOST_BOUND_INFLATION": "1.05", "CUDASCHED_POLICY": "harvest"}, ""),
        ({"CUDASCHED_MAX_INFLATION": "1.2"}, ""),
        ({"CUDASCHED_MAX_INFLATION": "1.2", "CUDASCHED_LEAD_US": "20"}, "max_inflation = 1.2 has no effect"),
        ({"CUDASCHED_PARK": "1GiB"}, "CUDASCHED_PARK: park = .* has no effect: only memory of pageable = true moves"),
        ({"CUDASCHED_PARK": "none"}, ""),
        ({"CUDASCHED_MEMORY_TURN_MS": "300", "CUDASCHED_PAGEABLE": "on"}, "memory_turn_ms = 300.0 has no effect"),
        ({"CUDASCHED_MEMORY_TURN_MS": "300", "CUDASCHED_PAGEABLE": "on", "CUDASCHED_PARK": "1GiB"}, ""),
        ({"CUDASCHED_SLOMS": "5"}, "CUDASCHED_SLOMS is no setting .* did you mean 'CUDASCHED_SLO_MS'"),
        ({"CUDASCHED_SIM_SCALE": "5", "CUDASCHED_OFF": "0", "CUDASCHED_COMMIT": "x"}, ""),
    ],
)
def test_what_has_no_effect_is_said(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    notes = config.resolve(environment=variables, directory=tmp_path).notes
    assert len(notes) == bool(said) and (not said or re.search(said, notes[0])), notes


def test_it_is_said_once(cudasched: Run, simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_SLO_MS", "5")
    program = "import subprocess, sys, cudasched; subprocess.run([sys.executable, '-c', 'import cudasched'])"
    done = cudasched("run", "--", sys.executable, "-c", program)
    assert done.returncode == 0 and done.stderr.count("has no effect") == 1, done.stderr


def test_a_named_driver_that_is_not_there_is_said(tmp_path: Path, python: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_DRIVER", "/nowhere/libcuda.so.1")
    done = python("import cudasched")
    assert done.returncode == 0 and "HookWarning: CUDASCHED_DRIVER=/nowhere/libcuda.so.1" in done.stderr


def test_home_is_where_xdg_is_not_set(tmp_path: Path) -> None:
    (tmp_path / ".config" / "cudasched").mkdir(parents=True)
    (tmp_path / ".config" / "cudasched" / "config.toml").write_text('name = "mine"')
    assert config.resolve(environment={"HOME": str(tmp_path)}, directory=Path("/nonexistent")).config.name == "mine"


def test_a_home_that_cannot_be_entered_has_no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container of another user, where `cudasched run` ended with "Permission denied"; a name is too long here,
    because root may enter every directory.
    """
    monkeypatch.setenv("HOME", "/" + "x" * 300)
    assert config.resolve().environment()["CUDASCHED_MODEL"] == str(config._MODELS)


def test_a_directory_without_models_hides_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an editable install without a model: its engine looks for the package's in another place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    models = tmp_path / "cudasched" / "models"
    models.mkdir(parents=True)
    assert config.resolve(environment={}).environment()["CUDASCHED_MODEL"] == str(config._MODELS)
    (models / "sm_90.ubj").touch()
    assert "CUDASCHED_MODEL" not in config.resolve(environment={}).environment()


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
