"""The engine's settings (csrc/runtime/settings) and Python's (config.py) have the same names, values and defaults."""

from __future__ import annotations

import json
import re

import pytest
from cudasched import config, hook
from support import ROOT, Run

HEADER = "".join(
    (ROOT / "csrc/runtime" / name).read_text(encoding="utf-8") for name in ("settings.hpp", "slices/settings.hpp")
)
SOURCE = (ROOT / "csrc/runtime/settings.cpp").read_text(encoding="utf-8")

ELSEWHERE = {"log", "log_file", "driver"}
"""Fields that are no part of the engine's settings: of csrc/base/log and csrc/hook/find_driver."""

NO_FIELD = {"CUDASCHED_COVERAGE_DIR", "CUDASCHED_CUPTI", "CUDASCHED_LAUNCHER_SPINS", "CUDASCHED_OFFLOAD_BESIDE_TOOLS"}
"""Variables of the engine that no field of `Config` stands for."""

CANDIDATES = [
    *("latency", "normal", "best_effort", "best-effort", "Latency", "urgent"),
    *("strict", "slack", "harvest", "open", "fair", "free", "deadline", "auto", "automatic", "ahead", "always"),
    *("on", "off", "TRUE", "no", "maybe", "error", "debug", "loud"),
    *("-9", "-8", "-1", "0", "1", "2", "2.5", "8", "9", "9.5", "10", "1.5", "nan", "inf", "1e400", "5ms", "0x10", " 1"),
    *("0.0009", "0.001", "0.09", "0.1", "0.9", "0.999", "0.9995", "1.0005", "1.001", "1000", "1000.5"),
    *("none", "20GiB", "1.5 GB", "20gib", "20GiBs", "1048575", "1048576", "1e7", "1.e7", ".5GiB", "-1GiB", "+1GiB"),
    *("9007199254740993", "1048577KiB", "1152921504606846976", "1152921504606846977"),
    *("59999", "60000", "60000.5"),
    *("1000000", "1000000.5", "3600000", "3600000.5", "3600000000", "3600000001"),
]
"""Text that some setting takes and others refuse: words, and numbers on both sides of every bound."""

SAYS = """
import ctypes, json, sys
set_it = ctypes.CDLL(sys.argv[1]).cudasched_configure
print(json.dumps([set_it(name.encode(), value.encode()) == 0 for name, value in json.load(sys.stdin)]))
"""


def accepted(field: str, value: str) -> bool:
    try:
        config.SETTINGS[field].parse(value, True)
    except ValueError:
        return False
    return True


def test_the_names_are_the_same() -> None:
    ours = {variable for field, variable in config.VARIABLES.items() if field not in ELSEWHERE}
    assert set(re.findall(r'\{"(CUDASCHED_\w+)"', SOURCE)) == ours | NO_FIELD
    assert set(re.findall(r"// (CUDASCHED_\w+)", HEADER)) == ours | NO_FIELD
    assert {name.removeprefix("CUDASCHED_") for name in NO_FIELD} <= set(config.OTHER_VARIABLES)


def test_both_take_and_refuse_the_same_values(python: Run) -> None:
    asked = [(field, value) for field in config.SETTINGS if field != "driver" for value in CANDIDATES]
    told = python(SAYS, str(hook.locate().engine), input=json.dumps(asked))
    assert told.returncode == 0, told.stderr
    differ = [
        f"{field}={value}: the engine {'takes' if engine else 'refuses'} it"
        for (field, value), engine in zip(asked, json.loads(told.stdout), strict=True)
        if engine != accepted(field, value)
    ]
    assert differ == []


def engines_default(field: str) -> object:
    """As the header has it, times in ns; None where it has no initial value."""
    declared = re.search(rf"^ .*?(?:= ([^;]+))?; +// {config.VARIABLES[field]}\b", HEADER, re.MULTILINE)
    assert declared, field
    text = declared[1]
    if text is None:
        return None
    for enumerator in ("Class::k", "When::k"):
        if text.startswith(enumerator):
            return text.removeprefix(enumerator).lower()
    names = {"true": True, "false": False, "kNsPerUs": 1_000, "kNsPerMs": 1_000_000}
    text = text.replace("'", "")
    value: object = eval(text, {"__builtins__": {}}, names)  # a literal, or a product of two
    return value


@pytest.mark.parametrize("field", sorted(set(config.SETTINGS) - ELSEWHERE))
def test_the_defaults_are_the_same(field: str) -> None:
    ours: object = getattr(config.Config(), field)
    engines = engines_default(field)
    unit = {"us": 1_000, "ms": 1_000_000, "mb": 1_000_000}.get(field.rsplit("_", 1)[-1])
    if field == "latency_order":
        assert (ours == "deadline") is engines
    elif field == "model":  # what the package ships, which the engine is told of
        assert engines is None
    elif ours is None or (ours == "auto" and field != "graph_slices" and field != "job"):
        assert not engines
    elif unit is not None:
        assert isinstance(ours, float)
        assert ours * unit == engines
    else:
        assert ours == engines
