"""The engine's table of settings (csrc/runtime/settings.inc), `Config` and docs/configuration.md say the same."""

from __future__ import annotations

import pytest
from cudasched import config
from support import ROOT

NO_FIELD = {"coverage_dir", "cupti", "launcher_spins", "offload_beside_tools"}
"""Settings of the engine that no field of `Config` stands for."""

ELSEWHERE = {"log", "model"}
"""Settings with a default that others than the engine have: csrc/base/log, and the models that the package ships."""

ROWS = [
    [cell.strip() for cell in line.split("|")[1:5]]
    for line in (ROOT / "docs/configuration.md").read_text(encoding="utf-8").splitlines()
    if "| `CUDASCHED_" in line
]


def test_the_names_are_the_same() -> None:
    assert set(config.settings()) == set(config.VARIABLES) | NO_FIELD
    variables = {f"CUDASCHED_{each.name}" for each in config.settings().values()} - {"CUDASCHED_COVERAGE_DIR"}
    others = {f"CUDASCHED_{name}" for name in config._OTHER_VARIABLES} - {"CUDASCHED_CONFIG", "CUDASCHED_TOLD"}
    assert sorted(variable.strip("`") for _, variable, _, _ in ROWS) == sorted(variables | others)


@pytest.mark.parametrize("field", sorted(set(config.VARIABLES) - ELSEWHERE))
def test_the_defaults_are_the_same(field: str) -> None:
    setting = config.settings()[field]
    ours: object = getattr(config.Config(), field)
    assert (ours, type(ours)) == (setting.default, type(setting.default))
    (shown,) = (row for row in ROWS if row[1] == f"`{config.VARIABLES[field]}`")
    assert shown[0] == f"`{field.removeprefix('client_')}`"
    if setting.kind == "number":
        assert shown[3] == ("none" if ours is None else f"`{ours}`" if isinstance(ours, str) else f"{ours:.15g}")
    elif setting.kind not in ("text", "path"):
        words = (
            {True: "on", False: "off"} if setting.kind == "switch" else {0: "`none`" if setting.kind == "size" else 0}
        )
        assert shown[3] == str(words.get(ours, f"`{ours}`"))
