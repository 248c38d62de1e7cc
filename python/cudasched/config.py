"""The policy, from one documented precedence: call or command-line arguments > environment > TOML file > defaults.

The TOML file is the one that ``CUDASCHED_CONFIG`` names, else ``./cudasched.toml``, else
``$XDG_CONFIG_HOME/cudasched/config.toml`` (``~/.config`` if unset); files are not merged. The keys are the fields of
`Config`, at the top level; ``class`` may be written for ``client_class``::

    class = "latency"
    slo_ms = 5

A file that ``CUDASCHED_CONFIG`` names is trusted. One that was found is read only if it belongs to the effective user
or to root and no other user can have put it there, and ``./cudasched.toml`` may set no paths, because a path is code to
be loaded or a file to be written.

The engine has one definition for each setting (`settings`). The engine reads environment variables alone, and gets
`Resolved.environment`. An empty variable counts as unset. Relative paths of a file belong to the
file's directory, others to the working directory.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from cudasched._text import closest, printable, shown
from cudasched.errors import ConfigError, HookError

if TYPE_CHECKING:
    from cudasched import hook

__all__ = ["ClientClass", "Config", "Resolved", "Setting", "find_file", "parse", "parse_class", "resolve", "settings"]

ClientClass = Literal["latency", "normal", "best_effort"]

_NAME_BYTES = 63
_FILE_BYTES = 64 * 1024
_MODELS = Path(__file__).parent / "predictor" / "models"


@dataclass(frozen=True)
class Config:
    """The settings, whose meaning is in ``docs/configuration.md``.

    A field that is not set is left to the engine, whose default is the one given here.
    """

    client_class: ClientClass = "normal"
    priority: int = 0
    weight: float = 1.0
    slo_ms: float | None = None
    offload: bool = True
    policy: Literal["strict", "slack", "harvest", "open"] = "strict"
    lead_us: float | Literal["auto"] = "auto"
    max_inflation: float | None = None
    host_bound_inflation: float = 1.03
    margin_us: float = 200.0
    long_us: float = 300.0
    miss_probability: float = 0.0
    latency_order: Literal["free", "deadline"] = "free"
    node_priority: bool = True
    class_by_stream_priority: bool = False
    host_backoff_ms: float = 2.0
    graph_slices: Literal["auto", "ahead", "always", "off"] = "auto"
    graph_slice_us: float = 200.0
    graph_slice_mb: float = 1000.0
    graph_build_ms: float = 2000.0
    linger_us: float = 100.0
    max_idle_hold_ms: float = 5.0
    stale_heartbeat_ms: float = 100.0
    turn_ms: float = 3.0
    time_slice_us: int | Literal["auto", "off"] = "auto"
    job: str = "auto"
    memory_limit: int = 0
    pageable: bool = False
    park: int = 0
    memory_turn_ms: float | None = None
    give_back_ms: float = 1000.0
    model: str = str(_MODELS)
    cache_dir: str | None = None
    run_dir: str | None = None
    log: Literal["error", "warning", "info", "debug"] = "warning"
    log_file: str | None = None
    driver: str | None = None
    name: str | None = None


# ---- one definition a setting: csrc/runtime/settings.inc ----------------------------------------------------------


class Setting(NamedTuple):
    """A line of the engine's table.

    Attributes:
        name: The variable, without ``CUDASCHED_``.
        kind: ``word``, ``switch``, ``integer``, ``number``, ``size``, ``text`` or ``path``.
        words: All values of a ``word``, or the words in the place of a number.
        default: The engine's; None: it has none.
        least: The least that a number may be.
        most: The most.
    """

    name: str
    kind: str
    words: tuple[str, ...]
    default: object
    least: float
    most: float


@functools.lru_cache(maxsize=1)
def _core() -> hook._Core:
    from cudasched import hook

    return hook.load_core()


@functools.lru_cache(maxsize=1)
def settings() -> Mapping[str, Setting]:
    """The engine's table, by field of `Config`; settings that are no field by their name in small letters.

    Raises:
        HookError: The engine cannot be loaded into this process.
    """
    fields = {variable.removeprefix("CUDASCHED_"): field for field, variable in VARIABLES.items()}
    return {fields.get(name, name.lower()): Setting(name, *told) for name, told in _core().settings().items()}


def _written(value: object, kind: str) -> str:
    """A typed value as text; empty if the kind has none of its type."""
    if isinstance(value, bool):
        return str(int(value)) if kind == "switch" else ""
    if isinstance(value, int) and kind in ("integer", "number", "size") and value.bit_length() < 64:
        return str(value)
    return repr(value) if isinstance(value, float) and kind in ("number", "size") else ""


def parse(field: str, value: object, text: bool) -> Any:
    """A value as `Config` has it.

    Args:
        field: Of `Config`.
        value: The given one.
        text: The value is text of a variable or an option; else typed, as a file or a caller gives it.

    Raises:
        ValueError: The setting takes no such value; the message says which values it takes.
        HookError: The engine cannot be loaded into this process.
    """
    name, kind, words, default, *_ = settings()[field]
    if kind == "number" and default is None and value == "none" and not text:
        return None
    if kind in ("text", "path"):
        if not isinstance(value, str) or not value or "\0" in value:
            raise ValueError("must be text, and not empty")
        if field == "name" and len(value.encode(errors="surrogateescape")) > _NAME_BYTES:
            raise ValueError(f"a name has at most {_NAME_BYTES} bytes")
        return value
    if kind == "switch" and not text and not isinstance(value, bool):
        raise ValueError("must be true or false")
    is_text = isinstance(value, str) and (text or kind in ("word", "size") or value in words)
    try:
        written = str(value) if is_text else _written(value, kind)
        return _core().parse_setting(name, written.encode(errors="replace"))
    except ValueError as error:
        if field == "client_class":
            raise ValueError(f"unknown class, known are {', '.join(words)}{closest(value, words)}") from None
        raise ValueError(f"must be {error}{closest(value, words)}") from None


def parse_size(value: object) -> int:
    """``20GiB``, ``1.5 GB`` or a number of bytes; 0 or ``none``: no limit, which is 0.

    Raises:
        ValueError: The text is no size.
    """
    return cast(int, parse("memory_limit", value, True))


VARIABLES: Mapping[str, str] = {
    field: "CUDASCHED_CLASS" if field == "client_class" else f"CUDASCHED_{field.upper()}"
    for field in Config.__dataclass_fields__
}
"""The environment variable of each field of `Config`."""

_OTHER_VARIABLES = ("CONFIG", "OFF", "COLLECT_DIR", "COLLECT_TIMING", "COLLECT_LABEL", "TOLD")
"""Variables that are no settings of the engine, without ``CUDASCHED_``."""

_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_OFF = "off"  # in the place of a path


def models_directory(config: Config) -> Path | None:
    """Where `cudasched train` puts models, and the engine looks for them first; None where nothing is kept."""
    if config.cache_dir is not None:
        return None if config.cache_dir == _OFF else Path(config.cache_dir) / "models"
    cache, home = os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("HOME", "")
    if cache.startswith("/"):
        return Path(cache) / "cudasched" / "models"
    return Path(home) / ".cache" / "cudasched" / "models" if home.startswith("/") else None


@dataclass(frozen=True)
class Resolved:
    """A `Config` and where its values came from.

    Attributes:
        config: The values, defaults included.
        origins: For each field that was set: ``--slo-ms`` or ``slo_ms`` (an argument), ``CUDASCHED_SLO_MS`` (a
            variable) or ``path/to/cudasched.toml, line 3``.
        notes: Notes for the user: a file that is not trusted, settings that have no effect.
        refused: The wrong values, one message each; empty unless `resolve` was told to go on (`tolerant`).
    """

    config: Config
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def chosen_class(self) -> ClientClass | None:
        """The process's class; None if it is so by default alone."""
        return self.config.client_class if "client_class" in self.origins else None

    def environment(self) -> dict[str, str]:
        """The engine's environment variables: one for each field that was set, and the models that are shipped."""
        # A build without models says nothing of them; a model that `cudasched train` made comes before them.
        directory = models_directory(self.config)
        trained = directory and glob.glob("sm_*", root_dir=directory)
        shipped = ("model",) if _MODELS.is_dir() and not trained else ()
        values = {field: getattr(self.config, field) for field in (*shipped, *self.origins)}
        return {
            VARIABLES[field]: str(int(value) if isinstance(value, bool) else value)
            for field, value in values.items()
            if value is not None
        }


def untold(texts: Iterable[str], environment: MutableMapping[str, str]) -> list[str]:
    """Those that no process has said from which this one comes.

    Args:
        texts: The messages.
        environment: Of this process; marks the messages there as said, for child processes.
    """
    marks = environment.get("CUDASCHED_TOLD", "").split(",")
    new = {f"{zlib.crc32(text.encode(errors='replace')):08x}": text for text in texts}
    left = [text for mark, text in new.items() if mark not in marks]
    if left:
        environment["CUDASCHED_TOLD"] = ",".join(filter(None, [*marks, *(mark for mark in new if mark not in marks)]))
    return left


def switched_off(environment: Mapping[str, str]) -> bool:
    """``CUDASCHED_OFF=1`` (``true``, ``yes``, ``on``): every call passes through, nothing is installed."""
    return _SWITCH.get(environment.get("CUDASCHED_OFF", "").lower(), False)


# ---- files ---------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A configuration file.

    Attributes:
        path: Where it is.
        named: ``CUDASCHED_CONFIG`` names it, so it is trusted.
        may_set_paths: The file is named, or in the user's own configuration directory.
    """

    path: Path
    named: bool
    may_set_paths: bool


class _UntrustedError(Exception):
    """A file that was found is not to be read; says why."""


def find_file(environment: Mapping[str, str], directory: Path) -> Found | None:
    """The TOML file that holds: see the module's text.

    Args:
        environment: Variables to look at.
        directory: Where ``./cudasched.toml`` is looked for.

    Returns:
        None if there is no file. The file of ``CUDASCHED_CONFIG`` is returned whether or not it exists.
    """
    if named := environment.get("CUDASCHED_CONFIG"):
        return Found(directory / Path(named).expanduser(), named=True, may_set_paths=True)
    home = environment.get("HOME")
    base = environment.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else None)
    candidates = [Found(directory / "cudasched.toml", named=False, may_set_paths=False)]
    if base:
        candidates.append(Found(Path(base) / "cudasched" / "config.toml", named=False, may_set_paths=True))
    return next((found for found in candidates if os.path.isfile(found.path)), None)


def _user(uid: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _why_untrusted(path: Path, file: os.stat_result) -> str | None:
    """Why a file that was found may be another's work; None if it cannot be."""
    link, parent = os.lstat(path), os.stat(path.parent)
    for what, status in (("it", file), ("its link", link)):
        if status.st_uid not in (os.geteuid(), 0):
            return f"{what} belongs to {_user(status.st_uid)}"
    if not stat.S_ISREG(file.st_mode):
        return "it is not a regular file"
    if file.st_mode & stat.S_IWOTH:
        return "everyone may write to it"
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        return f"everyone may put files into {path.parent}"
    return None


def _content(found: Found) -> str:
    """The file's text. Raises ConfigError, or _UntrustedError for a found file that may be another's work."""
    path = found.path
    try:
        # Not blocking: a pipe without a writer is no reason to wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not found.named and (why := _why_untrusted(path, os.fstat(descriptor))):
                raise _UntrustedError(why)
            os.set_blocking(descriptor, True)
            content = b""
            while len(content) <= _FILE_BYTES and (part := os.read(descriptor, _FILE_BYTES + 1)):
                content += part
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > _FILE_BYTES:
        raise ConfigError(f"{path}: cannot be read: a configuration file has at most {_FILE_BYTES} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None


def line_of(text: str, key: str) -> int:
    """The line that sets `key`, 1 if it cannot be told."""
    pattern = re.compile(rf"""^\s*\[*\s*(["']?){re.escape(key)}\1\s*[].=]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 1)


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """A TOML file that the user names, and its text. Raises ConfigError, with the line, where it is none."""
    text = _content(Found(path, named=True, may_set_paths=True))
    return parse_toml(path, text), text


def parse_toml(path: Path, text: str) -> dict[str, Any]:
    """A TOML file's text as a table. Raises ConfigError, with the line, where it is none."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return dict(tomllib.loads(text))
    except RecursionError:
        raise ConfigError(f"{path}: not TOML that can be read: it is nested too deeply") from None
    except ValueError as error:  # tomllib's own, and Python's for a number of too many digits
        lines = text.splitlines() or [""]
        told = re.search(r"at line (\d+)", str(error))
        number = min(int(told.group(1)) if told else len(lines), len(lines))
        key = re.match(r"""\s*["']?([\w.-]+)""", lines[number - 1])
        where = f", key {key.group(1)!r}" if key else ""
        place = f", line {number}{where}" if told or isinstance(error, tomllib.TOMLDecodeError) else ""
        raise ConfigError(f"{path}{place}: not TOML: {error}") from None


class _Layer:
    """Values of one source, checked one by one."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.origins: dict[str, str] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []

    def take(self, field: str, value: object, *, text: bool, origin: str, named: str, base: Path) -> None:
        try:
            value = parse(field, value, text)
        except ValueError as error:
            self.problems.append(f"{named} = {shown(value)}: {error}")
            return
        if settings()[field].kind == "path" and value != _OFF:
            with contextlib.suppress(RuntimeError):  # "~nobody"
                value = str(base / Path(cast(str, value)).expanduser())
        self.values[field] = value
        self.origins[field] = origin


def _read_file(found: Found) -> _Layer:
    layer = _Layer()
    path = found.path
    try:
        text = _content(found)
        values = parse_toml(path, text)
    except _UntrustedError as error:
        layer.notes.append(
            f"{path} is not read: {error}, and a configuration file that was only found must be yours or root's; if "
            f"you trust it, set CUDASCHED_CONFIG={path}"
        )
        return layer
    except ConfigError as error:
        layer.problems.append(str(error))
        return layer
    if "class" in values and "client_class" in values:
        line = line_of(text, "class")
        layer.problems.append(f"{path}, line {line}: class and client_class are the same; keep one")
        return layer
    for key, value in values.items():
        field = "client_class" if key == "class" else key
        place = f"{path}, line {line_of(text, key)}"
        if field not in VARIABLES:
            layer.problems.append(f"{place}: unknown key {shown(key)}{closest(key, ['class', *VARIABLES])}")
        elif settings()[field].kind == "path" and not found.may_set_paths:
            layer.notes.append(
                f"{place}: {key} is ignored: a file that was only found sets no paths; if you trust it, set "
                f"CUDASCHED_CONFIG={path}, or set {VARIABLES[field]}"
            )
        else:
            base = path.parent.absolute()
            layer.take(field, value, text=False, origin=place, named=f"{place}: {key}", base=base)
    return layer


# ---- resolution ----------------------------------------------------------------------------------------------------


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it was removed under the program
        return Path()


def _without_effect(values: Mapping[str, object], origins: Mapping[str, str]) -> Iterable[str]:
    """Settings that were made and change nothing, because of another one."""

    def have(field: str, other: str, wanted: Collection[object], why: str) -> Iterable[str]:
        if values.get(field) is not None and values.get(other, getattr(Config, other)) not in wanted:
            yield f"{origins[field]}: {field} = {shown(values[field])} has no effect: {why}"

    yield from have("slo_ms", "client_class", ["latency"], "only class latency has a latency target")
    yield from have("max_inflation", "lead_us", ["auto"], "it bounds the lead where lead_us is auto")
    yield from have(
        "host_bound_inflation", "policy", ["harvest", "slack"], "only policies harvest and slack have such a bound"
    )
    yield from have("margin_us", "policy", ["slack"], "only policy slack has a margin")
    if values.get("park"):
        yield from have("park", "pageable", [True], "only memory of pageable = true moves")
    if values.get("memory_turn_ms"):
        yield from have("memory_turn_ms", "park", range(1, 2**63), "memory moves to the host memory of park alone")


def _misspelt(environment: Mapping[str, str]) -> Iterable[str]:
    """Variables that look like a setting's."""
    known = [*(setting.name for setting in settings().values()), *_OTHER_VARIABLES]
    for name in environment:
        word = name.removeprefix("CUDASCHED_")
        if word == name or word in known or word.startswith("SIM_"):
            continue
        if hint := closest(word, known, 0.8):
            yield f"{name} is no setting and has no effect{hint.replace(chr(39), chr(39) + 'CUDASCHED_', 1)}"


def resolve(
    arguments: Mapping[str, object] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    option: Callable[[str], str] | None = None,
    tolerant: bool = False,
) -> Resolved:
    """Resolves the policy: arguments > environment > TOML file > defaults.

    Args:
        arguments: Field to value, as given by a caller; None stands for "not given".
        environment: Variables to read; those of this process by default.
        directory: Stands for the working directory; that of this process by default.
        option: How an argument is named in errors (``--slo-ms`` for ``slo_ms``): arguments are a command's options
            then, and their text is read as a variable's is. By default an argument has its field's name, and a type.
        tolerant: Leave out wrong values, and say so in `Resolved.refused`.

    Returns:
        The values and their origins.

    Raises:
        ConfigError: A value has no meaning, a key is unknown, or the file cannot be read; the message says where the
            value came from. A wrong value is refused even if a layer above replaces it.
        HookError: The engine cannot be loaded into this process.
    """
    environment = os.environ if environment is None else environment
    directory = _working_directory() if directory is None else directory
    given = {field: value for field, value in (arguments or {}).items() if value is not None}
    for field in given:
        if field not in VARIABLES:
            raise ConfigError(f"unknown setting {field!r}{closest(field, VARIABLES)}")

    file = find_file(environment, directory)
    layers = [_read_file(file)] if file is not None else []
    variables = _Layer()
    for field, name in VARIABLES.items():
        if word := environment.get(name):
            variables.take(field, word, text=True, origin=name, named=name, base=directory)
    off = environment.get("CUDASCHED_OFF", "")
    if off and off.lower() not in _SWITCH:
        variables.problems.append(f"CUDASCHED_OFF = {shown(off)}: must be on or off (or 1 and 0, true and false)")
    called = _Layer()
    for field, value in given.items():
        origin = option(field) if option else field
        called.take(field, value, text=option is not None, origin=origin, named=origin, base=directory)

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    notes: list[str] = []
    problems: list[str] = []
    for layer in (*layers, variables, called):
        values.update(layer.values)
        origins.update(layer.origins)
        notes += layer.notes
        problems += layer.problems
    if problems and not tolerant:
        raise ConfigError(printable(problems[0]))
    notes += [*_without_effect(values, origins), *_misspelt(environment)]
    return Resolved(Config(**values), origins, tuple(map(printable, notes)), tuple(map(printable, problems)))


def _checked(field: str, value: object, name: str) -> Any:
    try:
        return parse(field, value, False)
    except ValueError as error:
        raise ConfigError(f"{name} = {shown(value)}: {error}") from None
    except HookError:  # without an engine nothing has an effect here
        return value


def parse_class(name: object) -> ClientClass:
    """The class that a name stands for; ``best-effort`` may be written for ``best_effort``.

    Raises:
        ConfigError: The class is unknown; the message lists the known ones.
    """
    return cast(ClientClass, _checked("client_class", name, "class"))


def check_region(client_class: object, priority: object, slo_ms: object) -> Config:
    """The settings of one region, stream or process class, checked; `Config` has the values of each.

    Raises:
        ConfigError: One of them has no meaning.
    """
    return Config(
        client_class=parse_class(client_class),
        priority=_checked("priority", priority, "priority"),
        slo_ms=None if slo_ms is None else _checked("slo_ms", slo_ms, "slo_ms"),
    )
