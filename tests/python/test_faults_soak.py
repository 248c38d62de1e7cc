"""Each soak for twelve seconds, or a few times; `python -m tests.soak` is the long one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import PATIENCE_S, ROOT


@pytest.mark.parametrize("graphs", [False, True], ids=["all", "graphs"])
def test_nothing_is_lost_reordered_or_hung(tmp_path: Path, graphs: bool) -> None:
    out = tmp_path / "soak.json"
    until = time.monotonic() + PATIENCE_S
    while True:
        seed = random.SystemRandom().randrange(2**31)
        done = subprocess.run(
            [sys.executable, "-m", "tests.soak", "--minutes", "0.2", "--seed", str(seed), "--out", str(out)]
            + ["--graphs"] * graphs,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            cwd=ROOT,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), f"seed {seed}"
        (row,) = json.loads(out.read_text())["rows"]
        assert not any(row[name] for name in ("failed", "hung", "slots_left", "processes_left"))
        assert graphs or not row["sliced_launches"]
        # On a busy machine few programs come far in twelve seconds, and none may have slices by then.
        if row["launches"] > 100 and row["killed"] > 0 and (row["sliced_launches"] > 0 or not graphs):
            return
        assert time.monotonic() < until, row


def test_memory_that_moves_keeps_every_byte(tmp_path: Path) -> None:
    out, seed = tmp_path / "memory.json", random.SystemRandom().randrange(2**31)
    command = [sys.executable, "-m", "tests.soak.moved_memory", "--count", "120", "--seed", str(seed)]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=4 * PATIENCE_S, cwd=ROOT
    )
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"
    counts = json.loads(done.stdout)
    assert counts["kills"] >= 2 and counts["requests"] > 0 and (counts["failed"], counts["refused"]) == (0, 0)
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["figure"], row["value"], row["n"]) == ("histories_failed", 0, 120)
