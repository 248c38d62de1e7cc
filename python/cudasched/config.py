"""The policy, from one documented precedence: call or command-line arguments > environment > TOML file > defaults.

The TOML file is the one that ``CUDASCHED_CONFIG`` names, else ``./cudasched.toml``, else
``$XDG_CONFIG_HOME/cudasched/config.toml`` (``~/.config`` if unset); files are not merged. Its keys are the fields of
`Config`, at the top level; ``class`` may be written for ``client_class``::

    class = "latency"
    slo_ms = 5

The engine reads environment variables alone: `Resolved.environment` is what it gets. An empty variable counts as
unset. Relative paths of a file belong to the file's directory, others to the working directory.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cudasched._anywhere import pydantic
from cudasched.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ClientClass", "Config", "Resolved", "find_file", "parse_class", "resolve"]

ClientClass = Literal["latency", "normal", "best_effort"]

_HOUR_MS = 3_600_000
_INT32 = 2**31
_NAME_BYTES = 63


def _closest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing if no known word is near."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _class_name(value: object) -> object:
    """Accepts ``best-effort`` for ``best_effort``; what is unknown is refused with the known names."""
    name = "best_effort" if value == "best-effort" else value
    if name not in get_args(ClientClass):
        known = ("latency", "normal", "best-effort")
        raise ValueError(f"unknown class, known are {', '.join(known)}{_closest(str(value), known)}")
    return name


def _short_name(value: str) -> str:
    if len(value.encode()) > _NAME_BYTES:
        raise ValueError(f"a name has at most {_NAME_BYTES} bytes")
    return value


_Milliseconds = Annotated[float, pydantic.Field(gt=0, le=_HOUR_MS, allow_inf_nan=False)]
_Microseconds = Annotated[float, pydantic.Field(ge=0, le=_HOUR_MS * 1e3, allow_inf_nan=False)]
_Text = Annotated[str, pydantic.Field(min_length=1, pattern=r"^[^\x00]*$")]


_MODELS = Path(__file__).parent / "predictor" / "models"


class Config(pydantic.BaseModel):
    """What can be set. A field that nobody set is left to the engine, whose default is the one given here.

    Attributes:
        client_class: Class of launches that no region and no stream decides.
        priority: Within the class, higher first.
        slo_ms: The program's own latency target, ms; none by default.
        offload: Whether a thread of cudasched's own makes best-effort launches, while the program's threads go on.
        policy: When a best-effort launch may go beside latency work: ``strict``, ``slack`` or ``open``.
        lead_us: How much best-effort time may be in flight when the next best-effort launch is submitted, us, or
            ``auto``: found on line, beginning with 20, or with 60 without offload.
        max_inflation: How much slower latency requests may become by what is in flight when they come (1.2: by 20%);
            bounds the lead where that is ``auto``. None by default.
        margin_us: What ``slack`` leaves alone of a request's slack, us.
        long_us: A best-effort launch with a longer bound looks out for foreseen latency work, us.
        miss_probability: Where latency work comes at random, how probable it may be that some comes in the middle of a
            long launch; 0: long launches look out for periodic work alone.
        latency_order: In which order several latency clients enter their regions: ``free``, or ``deadline`` (the
            earliest first).
        node_priority: Whether graphs that latency clients instantiate get the highest priority for their kernel nodes,
            and best-effort ones the lowest.
        host_backoff_ms: How long best-effort threads of a program pause at their next launch while another thread
            of it is in a latency region, ms; 0: they do not.
        linger_us: How long the gate stays closed after latency work is done, us; to a long launch twice as long.
        max_idle_hold_ms: How long an active latency client with nothing on the GPU holds the gate closed, ms.
        stale_heartbeat_ms: After how long a silent latency client stops holding the gate closed, ms.
        turn_ms: How long one of several best-effort processes feeds the GPU, ms.
        job: The job that this program belongs to; the best-effort gates on all of its GPUs close and open together.
            ``auto``: the processes that share ``MASTER_ADDR`` and ``MASTER_PORT``, else the GPUs of this process; a
            name: the processes that have the same; ``off``: each GPU by itself.
        model: Model of the predictor: a saved XGBoost model, a directory of such by GPU architecture (``sm_90.ubj``),
            or ``off``; the models that the package ships by default.
        cache_dir: Where the predictor keeps what it learned between runs, or ``off``; ``$XDG_CACHE_HOME/cudasched`` or
            ``~/.cache/cudasched`` by default.
        run_dir: Directory of the shared tables; ``/dev/shm/cudasched-<uid>`` by default.
        log: What the engine says on standard error.
        driver: Path of the real ``libcuda.so.1``; searched for by default.
        name: How ``cudasched status`` calls this program, at most 63 bytes; the program's own name by default.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    client_class: Annotated[ClientClass, pydantic.BeforeValidator(_class_name)] = "normal"
    priority: Annotated[int, pydantic.Field(ge=-_INT32, lt=_INT32)] = 0
    slo_ms: Annotated[_Milliseconds, pydantic.Field(ge=0.001)] | None = None
    offload: bool = True
    policy: Literal["strict", "slack", "open"] = "strict"
    lead_us: _Microseconds | Literal["auto"] = "auto"
    max_inflation: Annotated[float, pydantic.Field(ge=1.001, le=1000, allow_inf_nan=False)] | None = None
    margin_us: _Microseconds = 200.0
    long_us: _Microseconds = 300.0
    miss_probability: Annotated[float, pydantic.Field(ge=0, le=0.999, allow_inf_nan=False)] = 0.0
    latency_order: Literal["free", "deadline"] = "free"
    node_priority: bool = True
    host_backoff_ms: Annotated[float, pydantic.Field(ge=0, le=_HOUR_MS, allow_inf_nan=False)] = 2.0
    linger_us: _Microseconds = 100.0
    max_idle_hold_ms: Annotated[_Milliseconds, pydantic.Field(ge=0.1)] = 5.0
    stale_heartbeat_ms: Annotated[_Milliseconds, pydantic.Field(ge=1)] = 100.0
    turn_ms: Annotated[_Milliseconds, pydantic.Field(ge=0.1)] = 3.0
    job: _Text = "auto"
    model: _Text = str(_MODELS)
    cache_dir: _Text | None = None
    run_dir: _Text | None = None
    log: Literal["error", "warning", "info", "debug"] = "warning"
    driver: _Text | None = None
    name: Annotated[_Text, pydantic.AfterValidator(_short_name)] | None = None


VARIABLES: Mapping[str, str] = {
    "client_class": "CUDASCHED_CLASS",
    **{field: f"CUDASCHED_{field.upper()}" for field in Config.model_fields if field != "client_class"},
}
"""The environment variable of each field of `Config`."""

_PATHS = ("model", "cache_dir", "run_dir", "driver")
_OFF = "off"  # in the place of a path


@dataclass(frozen=True)
class Resolved:
    """A `Config` and where its values came from.

    Attributes:
        config: The values, defaults included.
        origins: For each field that was set: ``--slo-ms`` or ``slo_ms`` (an argument), ``CUDASCHED_SLO_MS`` (a
            variable) or ``path/to/cudasched.toml, line 3``.
    """

    config: Config
    origins: Mapping[str, str]

    @property
    def chosen_class(self) -> ClientClass | None:
        """The process's class; None if it is so by default alone."""
        return self.config.client_class if "client_class" in self.origins else None

    def environment(self) -> dict[str, str]:
        """The engine's environment variables: one for each field that was set, and the models that are shipped."""
        shipped = ("model",) if _MODELS.is_dir() else ()  # a build without models says nothing of them
        values = {field: getattr(self.config, field) for field in (*shipped, *self.origins)}
        return {
            VARIABLES[field]: str(int(value) if isinstance(value, bool) else value) for field, value in values.items()
        }


def _say(error: pydantic.ValidationError) -> tuple[str, str]:
    """The first field that is wrong, and why, in a few words."""
    first = error.errors(include_url=False)[0]
    message = first["msg"]
    if first["type"] == "value_error":
        return str(first["loc"][0]), message.removeprefix("Value error, ")
    return str(first["loc"][0]), re.sub(r"^\w+ should ", "must ", message)


def _absolute(values: dict[str, Any], base: Path) -> dict[str, Any]:
    for field in _PATHS:
        if isinstance(values.get(field), str) and values[field] not in ("", _OFF):
            values[field] = str(base / Path(values[field]).expanduser())
    return values


def _check(values: Mapping[str, Any], strings: bool, origin: Callable[[str], str]) -> Config:
    """One layer's values as a `Config`; a wrong one is refused as ``origin(field) = value: why``."""
    try:
        return Config.model_validate_strings(values) if strings else Config.model_validate(values, strict=True)
    except pydantic.ValidationError as error:
        field, why = _say(error)
        raise ConfigError(f"{origin(field)} = {values.get(field)!r}: {why}") from None


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it was removed under the program
        return Path()


def find_file(environment: Mapping[str, str], directory: Path) -> Path | None:
    """The TOML file that holds: see the module's text.

    Args:
        environment: Variables to look at.
        directory: Where ``./cudasched.toml`` is looked for.

    Returns:
        A path, or None if there is no file. What ``CUDASCHED_CONFIG`` names is returned whether or not it exists.
    """
    if named := environment.get("CUDASCHED_CONFIG"):
        return directory / Path(named).expanduser()
    home = environment.get("HOME")
    base = environment.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else None)
    candidates = [directory / "cudasched.toml"]
    if base:
        candidates.append(Path(base) / "cudasched" / "config.toml")
    return next((path for path in candidates if os.path.isfile(path)), None)


def _line_of(text: str, key: str) -> int:
    """The line that sets `key`, 1 if it cannot be told."""
    pattern = re.compile(rf"""^\s*\[*\s*(["']?){re.escape(key)}\1\s*[].=]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 1)


def _malformed(path: Path, text: str, error: tomllib.TOMLDecodeError) -> ConfigError:
    lines = text.splitlines() or [""]
    told = re.search(r"at line (\d+)", str(error))
    number = min(int(told.group(1)) if told else len(lines), len(lines))
    key = re.match(r"""\s*["']?([\w.-]+)""", lines[number - 1])
    where = f", key {key.group(1)!r}" if key else ""
    return ConfigError(f"{path}, line {number}{where}: not TOML: {error}")


def _read_file(path: Path) -> tuple[Config, dict[str, str]]:
    """The file's values and, for each, where it stands."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    try:
        values = dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise _malformed(path, text, error) from None

    known = list(Config.model_fields)
    keys: dict[str, str] = {"client_class": "class"} if "class" in values else {}
    for key in values:
        if key == "class" and "client_class" in values:
            raise ConfigError(f"{path}, line {_line_of(text, key)}: class and client_class are the same; keep one")
        if key != "class" and key not in known:
            hint = _closest(key, ["class", *known])
            raise ConfigError(f"{path}, line {_line_of(text, key)}: unknown key {key!r}{hint}")
    if "class" in values:
        values["client_class"] = values.pop("class")
    lines = {str(name): f"{path}, line {_line_of(text, keys.get(str(name), str(name)))}" for name in values}
    config = _check(
        _absolute(values, path.parent.absolute()),
        strings=False,
        origin=lambda field: f"{lines[field]}: {keys.get(field, field)}",
    )
    return config, lines


def resolve(
    arguments: Mapping[str, object] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    option: Callable[[str], str] | None = None,
) -> Resolved:
    """Resolves the policy: arguments > environment > TOML file > defaults.

    Args:
        arguments: Field to value, as given by a caller; None stands for "not given".
        environment: Variables to read; those of this process by default.
        directory: Stands for the working directory; that of this process by default.
        option: How an argument is named in errors (``--slo-ms`` for ``slo_ms``); by its field's name by default.

    Returns:
        The values and their origins.

    Raises:
        ConfigError: A value has no meaning, a key is unknown, or the file cannot be read; the message says where the
            value came from. A wrong value is refused even if a layer above replaces it.
    """
    environment = os.environ if environment is None else environment
    directory = _working_directory() if directory is None else directory
    given = {field: value for field, value in (arguments or {}).items() if value is not None}
    named = option or (lambda field: field)
    for field in given:
        if field not in Config.model_fields:
            raise ConfigError(f"unknown setting {field!r}{_closest(field, Config.model_fields)}")
    variables = {field: environment[name] for field, name in VARIABLES.items() if environment.get(name)}

    file = find_file(environment, directory)
    layers: list[tuple[Config, Mapping[str, str]]] = []
    if file is not None:
        layers.append(_read_file(file))
    layers.append(
        (
            _check(_absolute(variables, directory), strings=True, origin=VARIABLES.__getitem__),
            {field: VARIABLES[field] for field in variables},
        )
    )
    layers.append(
        (_check(_absolute(given, directory), strings=False, origin=named), {field: named(field) for field in given})
    )
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for config, places in layers:
        values.update(config.model_dump(exclude_unset=True))
        origins.update(places)
    return Resolved(Config.model_construct(**values), origins)


def parse_class(name: object) -> ClientClass:
    """The class that a name stands for; ``best-effort`` may be written for ``best_effort``.

    Raises:
        ConfigError: The class is unknown; the message lists the known ones.
    """
    return _check({"client_class": name}, strings=False, origin=lambda _: "class").client_class


def check_region(client_class: object, priority: object, slo_ms: object) -> Config:
    """The settings of one region, stream or process class, checked; `Config` says what each may be.

    Raises:
        ConfigError: One of them has no meaning.
    """
    names = {"client_class": "class"}
    values = {"client_class": client_class, "priority": priority, "slo_ms": slo_ms}
    return _check(values, strings=False, origin=lambda field: names.get(field, field))
