"""The page of `cudasched serve` in a real Chromium: what it shows, what a click does, and what it is safe from."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chromium import FOUND, Browser
from chromium import serving as other_server
from cudasched import control
from support import PATIENCE_S, ROOT

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("grpc")

from test_control import eventually, program
from test_serve import HOSTILE, Serving, server  # noqa: F401

needs_chromium = pytest.mark.skipif(FOUND is None, reason="needs Chromium: apt-get install chromium")
ASSETS = ROOT / "python" / "cudasched" / "serve" / "assets"


@needs_chromium
def test_lines_have_a_legend_and_a_phone_shows_all_without_a_scroll(server: Serving, tmp_path: Path) -> None:  # noqa: F811
    with program("train.py"), page(server, tmp_path / "profile", width=390, height=800) as browser:
        browser.wait_for("document.querySelectorAll('#clients tr').length === 1")
        browser.wait_for("document.querySelector('#charts .card:last-child .legend')?.innerText.includes('train.py')")
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth && innerWidth < 600")
        assert browser.evaluate("document.querySelector('.scroll').scrollWidth <= innerWidth")
        labels = browser.evaluate(
            "[...document.querySelectorAll('#clients td')].slice(1)"
            ".map((cell) => getComputedStyle(cell, '::before').content).join()"
        )
        assert all(f'"{name}"' in labels for name in ("class", "GPU %", "policy", "limit GiB"))
        assert browser.evaluate("getComputedStyle(document.querySelector('thead')).display") == "none"


@contextmanager
def page(
    running: Serving, place: Path, scheme: str = "light", width: int = 1280, height: int = 900
) -> Iterator[Browser]:
    """The page, opened with the token."""
    browser = Browser(place, width, height)
    try:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.ask("Emulation.setEmulatedMedia", features=features)
        browser.open(f"{running.url}#token={running.token}")
        browser.wait_for("document.documentElement?.dataset.ready === '1'")
        yield browser
        assert browser.errors == []
    finally:
        browser.close()


def rows(browser: Browser) -> list[dict[str, Any]]:
    """What the table shows."""
    found = browser.evaluate(
        """JSON.stringify([...document.querySelectorAll("#clients tr")].map((row) => ({
            id: row.dataset.client,
            cells: [...row.children].map((cell) => cell.innerText),
            chosen: row.querySelector(".choice [aria-pressed=true]")?.dataset.choice,
            priority: row.querySelector("output").textContent,
            weight: row.querySelectorAll("select")[0].value,
            policy: row.querySelectorAll("select")[1].value,
        })))"""
    )
    read: list[dict[str, Any]] = json.loads(found)
    return read


def click(browser: Browser, selector: str) -> None:
    """As a mouse does, at the middle of the element."""
    box = json.loads(
        browser.evaluate(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return JSON.stringify([box.x + box.width / 2, box.y + box.height / 2]); })()"
        )
    )
    for kind in ("mousePressed", "mouseReleased"):
        browser.ask("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)


@needs_chromium
def test_a_click_changes_a_class(server: Serving, tmp_path: Path) -> None:  # noqa: F811
    with program("train.py"), program("serve.py", "region"):
        server.client("train.py")
        server.client("serve.py")
        with page(server, tmp_path / "profile") as browser:
            browser.wait_for("document.querySelectorAll('#clients tr').length === 2")
            (train,) = (row for row in rows(browser) if "train.py" in row["cells"][0])
            assert (train["chosen"], train["priority"], train["weight"], train["policy"]) == (
                "best_effort",
                "0",
                "1",
                "strict",
            )
            row = f"tr[data-client='{train['id']}']"
            click(browser, f"{row} [data-choice=latency]")
            browser.wait_for(f'document.querySelector("{row} [data-choice=latency][aria-pressed=true]") !== null')
            eventually(lambda: server.client("train.py")["client_class"] == "latency")
            click(browser, f"{row} .steps button:last-child")
            browser.wait_for(f"document.querySelector(\"{row} output\").textContent === '1'")
            assert server.client("train.py")["priority"] == 1
            # The program that has regions is refused, and the page says why.
            (serve,) = (row for row in rows(browser) if "serve.py" in row["cells"][0])
            click(browser, f"tr[data-client='{serve['id']}'] [data-choice=best_effort]")
            browser.wait_for("document.getElementById('notice').textContent.includes('regions decide the class')")
            assert server.client("serve.py")["client_class"] == "normal"
            # Neither the address nor the history has the token.
            assert browser.evaluate("location.href") == server.url


@needs_chromium
def test_charts_of_the_last_minutes_light_and_dark_wide_and_narrow(
    server: Serving,  # noqa: F811
    tmp_path: Path,
) -> None:
    keep = os.environ.get("PAGE_PICTURES")
    backs = []
    with program("python notebook.py"), program("python serve.py", "region"):
        for scheme, width in (("light", 1280), ("dark", 1280), ("light", 420)):
            with page(server, tmp_path / f"{scheme}{width}", scheme, width) as browser:
                assert browser.evaluate("document.querySelectorAll('#charts svg').length") == 5
                lines = "document.querySelectorAll('#charts .card:last-child path').length"
                browser.wait_for(f"{lines} === 2")
                path = browser.evaluate("document.querySelector('#charts .card:last-child path').getAttribute('d')")
                assert path.startswith("M") and "NaN" not in browser.evaluate("document.body.outerHTML")
                backs.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
                # Nothing sticks out.
                assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
                table = "document.querySelector('.scroll')"
                assert browser.evaluate(f"{table}.scrollWidth <= {table}.clientWidth")
                if keep:
                    time.sleep(8)
                browser.picture(tmp_path / "page.png")
                assert (tmp_path / "page.png").stat().st_size > 10_000
                if keep:
                    (tmp_path / "page.png").rename(Path(keep) / f"page-{scheme}-{width}.png")
    assert backs[0] != backs[1] and backs[0] == backs[2]


@needs_chromium
def test_names_are_text_whatever_is_in_them(server: Serving, tmp_path: Path) -> None:  # noqa: F811
    with program(HOSTILE):
        server.client(HOSTILE)
        with page(server, tmp_path / "profile") as browser:
            browser.wait_for("document.querySelectorAll('#clients tr').length === 1")
            assert HOSTILE in rows(browser)[0]["cells"][0]
            assert browser.evaluate("document.querySelectorAll('img').length") == 0
            assert browser.evaluate("document.title") == "cudasched"


@needs_chromium
def test_without_a_token_or_with_a_wrong_one_it_asks(server: Serving, tmp_path: Path) -> None:  # noqa: F811
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(server.url)
        browser.wait_for("document.getElementById('login')?.hidden === false")
        assert browser.evaluate("document.getElementById('content').hidden")
        enter = "document.getElementById('token').value = {!r}; document.querySelector('#login button').click()"
        browser.evaluate(enter.format("wrong" * 10))
        browser.wait_for("document.getElementById('refused').textContent.includes('that is not the token')")
        browser.evaluate(enter.format(server.token))
        browser.wait_for("document.documentElement?.dataset.ready === '1'")
        # The tab keeps it; the page asks nobody again.
        browser.ask("Page.reload")
        browser.wait_for("document.documentElement?.dataset.ready === '1'")
        assert browser.errors == []
    finally:
        browser.close()


@needs_chromium
def test_a_page_of_another_origin_gets_nothing(server: Serving, tmp_path: Path) -> None:  # noqa: F811
    other = tmp_path / "other"
    other.mkdir()
    (other / "index.html").write_text("<!doctype html><title>other</title>")
    with program("train.py"), other_server(other) as address:
        client = server.client("train.py")
        browser = Browser(tmp_path / "profile")
        try:
            browser.open(address)
            browser.wait_for("document.title === 'other'")
            tried = f"""
            (async () => {{
              const headers = {{ Authorization: "Bearer {server.token}" }};
              const json = {{ ...headers, "Content-Type": "application/json" }};
              const path = "{server.url}api/v1/clients";
              const attempts = [
                () => fetch(path, {{ headers }}),
                () => fetch(path, {{ mode: "no-cors" }}).then((answer) => answer.text()),
                () => fetch(path + "/{client["id"]}", {{ method: "PATCH", headers: json, body: '{{"weight": 9}}' }}),
              ];
              const found = [];
              for (const attempt of attempts) {{
                try {{ found.push(await attempt()); }} catch (error) {{ found.push("refused"); }}
              }}
              const frame = document.createElement("iframe");
              frame.src = "{server.url}";
              document.body.append(frame);
              await new Promise((done) => {{ frame.onload = done; setTimeout(done, 3000); }});
              let inside = "refused";
              try {{ inside = String(frame.contentDocument); }} catch (error) {{ /* of another origin */ }}
              return JSON.stringify([...found, inside]);
            }})()"""
            assert set(json.loads(browser.evaluate(tried))) <= {"refused", "", "null"}
        finally:
            browser.close()
        assert server.client("train.py")["weight"] == 1.0


@needs_chromium
def test_a_limit_that_is_no_number_changes_nothing(server: Serving, tmp_path: Path) -> None:  # noqa: F811
    """Guards against a slip of the hand that took a client's limit of memory away."""
    with program("train.py"):
        client = server.client("train.py")["id"]
        control.change(client, memory_limit="2GiB")
        with page(server, tmp_path / "profile") as browser:
            field = f"document.querySelector(\"tr[data-client='{client}'] input\")"
            browser.wait_for(f"{field}?.value === '2'")
            for text in ("2e", "-1"):
                browser.evaluate("document.getElementById('notice').textContent = ''")
                browser.evaluate(f"{field}.select()")
                browser.ask("Input.insertText", text=text)
                browser.evaluate(f"{field}.blur()")
                browser.wait_for("document.getElementById('notice').textContent !== ''")
                assert server.client("train.py")["memory_limit_bytes"] == 2 << 30
                assert "is a number of GiB" in browser.evaluate("document.getElementById('notice').textContent")
                browser.wait_for(f"{field}?.value === '2'")


@needs_chromium
def test_a_server_that_was_started_anew_is_shown_whatever_the_browsers_clock(
    server: Serving,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Guards against charts that stood still for as long as the server before had run."""
    with page(server, tmp_path / "profile") as browser:
        browser.evaluate("Date.now = () => 0")
        # As of a server that ran for long: this one numbers its samples from 1.
        browser.wait_for("samples.length > 0")
        browser.evaluate("samples[samples.length - 1].number = 1e9")
        browser.wait_for("samples.length > 0 && samples[samples.length - 1].number < 1e9")


@needs_chromium
def test_the_page_says_when_the_server_is_gone(server: Serving, tmp_path: Path) -> None:  # noqa: F811
    with page(server, tmp_path / "profile") as browser:
        assert browser.evaluate("document.getElementById('nobody').hidden") is False
        server.process.terminate()
        browser.wait_for("document.getElementById('summary').textContent === 'the server does not answer'")
    assert server.process.wait(PATIENCE_S) == 0


def test_the_page_loads_nothing_from_elsewhere_and_is_small() -> None:
    total = 0
    for path in sorted(ASSETS.iterdir()):
        text = path.read_text(encoding="utf-8")
        elsewhere = text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in elsewhere and "https://" not in elsewhere, path
        total += len(gzip.compress(text.encode(), 9, mtime=0))
    assert 0 < total <= 300_000
    script = (ASSETS / "page.js").read_text(encoding="utf-8")
    for markup in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert markup not in script, markup
