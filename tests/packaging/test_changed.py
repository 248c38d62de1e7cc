"""scripts/changed.py, which says what of the tests a change needs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("changed", ROOT / "scripts/changed.py")
assert spec is not None and spec.loader is not None
changed = importlib.util.module_from_spec(spec)
spec.loader.exec_module(changed)


def test_a_room_is_tested_by_its_sources_and_its_tests() -> None:
    files = [
        "csrc/queue/ring.hpp",
        "tests/csrc/schedule/test_lead.cpp",
        "include/cudasched/engine.h",
        "csrc/bindings/core.cpp",
    ]
    assert changed.rooms(files) == ["include", "queue", "schedule"]
    assert changed.sources(files) == ["csrc/bindings/core.cpp", "csrc/queue/ring.cpp"]
    assert set(changed.ENGINE_TESTS) <= set(changed.tests(files))


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("python/cudasched/doctor.py", "tests/python/test_doctor.py"),
        ("python/cudasched/cli/doctor.py", "tests/python/test_cli.py"),
        ("python/cudasched/observe/trace/_file.py", "tests/python/test_trace_file.py"),
        ("python/cudasched/tune/dashboard/_app.py", "tests/python/test_tune_dashboard.py"),
        ("python/cudasched/errors.py", "tests/python/test_api.py"),
        ("tests/python/program.py", "tests/python/test_sharing.py"),
        ("tests/python/test_region.py", "tests/python/test_region.py"),
        ("scripts/words.py", "tests/packaging/test_words.py"),
        ("docs/dataset.md", "tests/packaging/test_site.py"),
        ("benchmarks/spans.py", "tests/benchmarks"),
        ("csrc/hook/entry_points.txt", "tests/python/test_entry_points.py"),
    ],
)
def test_a_file_has_its_tests(file: str, test: str) -> None:
    found = changed.tests([file])
    assert test in found and all((ROOT / each).exists() for each in found)


def test_what_needs_a_gpu_or_is_no_file_is_left_out() -> None:
    assert changed.tests(["tests/gpu/test_gpu.py", "tests/python/test_that_is_gone.py"]) == []


def test_a_change_is_all_since_the_branch_left_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-b", "main")
    for name in ("old", "edited", "committed"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    git("checkout", "-b", "branch")
    (tmp_path / "committed").write_text("2")
    git("commit", "-am", "second")
    git("checkout", "main")
    (tmp_path / "old").write_text("2")
    git("commit", "-am", "of main alone")
    git("checkout", "branch")
    (tmp_path / "edited").write_text("2")
    (tmp_path / "new").write_text("1")
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    assert changed.changed() == ["committed", "edited", "new"]
    monkeypatch.setenv("BASE", "branch")
    assert changed.changed() == ["edited", "new"]


def test_clang_tidy_looks_at_changed_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diff = ["@@ -3 +3,2 @@ f()", "+a", "+b", "@@ -9,2 +10,0 @@", "-c", "@@ -20 +19 @@", "+d"]
    (tmp_path / "csrc").mkdir()
    for name in ("a.cpp", "new.cpp", "shorter.cpp"):
        (tmp_path / "csrc" / name).touch()
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    diffs = {"csrc/a.cpp": diff, "csrc/shorter.cpp": ["@@ -9,2 +8,0 @@"], "csrc/new.cpp": []}
    monkeypatch.setattr(changed, "git", lambda *arguments: diffs.get(arguments[-1], ["left"]))
    (told,) = changed.lines(["csrc/a.cpp", "csrc/new.cpp", "csrc/shorter.cpp", "csrc/gone.cpp", "docs/x.md"])
    assert json.loads(told) == [{"name": "csrc/a.cpp", "lines": [[3, 4], [19, 19]]}, {"name": "csrc/new.cpp"}]
