"""Damaged files end in an answer or in one of cudasched's errors: a short run; `python -m benchmarks.hardening` is the
long one.
"""

from __future__ import annotations

import random

import pytest

from benchmarks.hardening import damage
from benchmarks.hardening.__main__ import figure


@pytest.mark.parametrize(("kind", "count"), [("toml", 200), ("parquet", 150), ("models", 40)])
def test_damaged_files_are_read_or_refused(kind, count):
    assert damage.run(kind, count, seed=100_000) == (0, [])


def test_a_model_whose_error_quotes_what_is_no_text():
    assert damage.run("models", 1, seed=4595) == (0, [])


def test_what_fails_and_what_crashes_is_counted(monkeypatch, tmp_path, capsys):
    def fail(path):
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")

    monkeypatch.setitem(damage.READERS, "toml", fail)
    assert damage.read_damaged("toml", 1, 3) == 3
    assert capsys.readouterr().out.count("failed ") == 3
    failed, said = damage.run("no such kind", 1)
    assert failed == 1 and "ended with" in said[0]


def test_equal_seeds_damage_equally():
    assert damage.mutate(random.Random(3), damage.TOML) == damage.mutate(random.Random(3), damage.TOML)
    assert len({damage.mutate(random.Random(seed), damage.TOML) for seed in range(50)}) > 40


def test_a_figure_is_met_where_less_is_better():
    assert figure("import_ms", [50, 60, 90], 3).met
    missed = figure("damaged_toml_failed", [1], 5000, "seed 3 fails")
    assert not missed.met and missed.limited_by == "seed 3 fails"
