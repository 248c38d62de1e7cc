"""Damaged files end in an answer or in one of cudasched's errors, and damaged tables harm no program: short runs."""

from __future__ import annotations

import random

import pytest

from benchmarks.hardening import tables
from benchmarks.lab.run import run
from benchmarks.results.schema import load
from tests.soak import damage


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


def test_figures_are_written_and_what_fails_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "measure", lambda count: (1, ["1 x a program hangs"]))
    assert run("hardening", ["--out", str(tmp_path / "hardening.json")]) == 0
    (row,) = load(tmp_path / "hardening.json").rows
    assert (row.value, row.n, row.met) == (1, 5000, False) and row.limited_by


def test_damaged_tables_harm_no_program():
    assert tables.measure(count=40, seed=1, patience_s=120.0, goal_s=None) == (0, [])
