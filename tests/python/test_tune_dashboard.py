"""`cudasched dashboard`: who may see it, what it opens, and the page in a real Chromium over a synthetic space."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import FOUND, Browser
from cudasched.advise import advise
from cudasched.errors import ConfigError, Error
from cudasched.tune.dashboard import Options, _serve, command_line
from cudasched.tune.dashboard._data import Entry, Layer, grid, layers, open_file, pareto, recorded
from cudasched.tune.database import Database, Key
from cudasched.tune.measurement import Measurement
from support import PATIENCE_S, ROOT, Run
from synthetic_spaces import SMALL, recording, small
from test_control import eventually

PICTURES = os.environ.get("PICTURES")


@pytest.mark.parametrize("address", ["0.0.0.0", "192.168.1.5", "::"])
def test_an_address_that_others_reach_is_refused_without_the_flag(address: str, cudasched: Run) -> None:
    with pytest.raises(ConfigError, match="--any-address allows that"):
        Options(address=address).check()
    Options(address=address, any_address=True).check()
    Options(address="::1").check()


def test_wrong_options_are_refused(tmp_path: Path, cudasched: Run) -> None:
    for options, said in (
        (Options(address="example.org"), "an IP address"),
        (Options(port=0), "1 to 65535"),
        (Options(files=(tmp_path / "none",)), "no such file"),
    ):
        with pytest.raises(ConfigError, match=said):
            options.check()
    done = cudasched("dashboard", "--address", "0.0.0.0")
    assert done.returncode == 2 and "--any-address" in done.stderr


def test_a_database_that_cannot_be_opened_is_refused_before_there_is_a_page(tmp_path: Path, cudasched: Run) -> None:
    """Guards against a page that shows an error without a reason."""
    pytest.importorskip("streamlit")
    (tmp_path / "text.sqlite").write_text("no database at all" * 100)
    done = cudasched("dashboard", "--database", str(tmp_path / "text.sqlite"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "text.sqlite: the tuner's database cannot be opened" in done.stderr


def test_an_address_that_cannot_be_had_is_refused_before_it_is_printed(tmp_path: Path, cudasched: Run) -> None:
    """Guards against a token that is printed for another program's port, and Streamlit's stack trace."""
    pytest.importorskip("streamlit")
    given = ["dashboard", "--any-address", "--database", str(tmp_path / "tune.sqlite")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = cudasched(*given, "--port", port)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"127.0.0.1 port {port} is in use by another program: choose another with --port" in done.stderr
    done = cudasched(*given, "--address", "192.0.2.1")  # of documentation, RFC 5737
    assert (done.returncode, done.stdout) == (2, "")
    assert "192.0.2.1 is no address of this machine: choose 127.0.0.1" in done.stderr


def test_protection_is_on_and_telemetry_off() -> None:
    given = command_line(Options())
    for flag in (
        "--server.address=127.0.0.1",
        "--server.enableXsrfProtection=true",
        "--server.enableCORS=true",
        "--browser.gatherUsageStats=false",
        "--client.showErrorDetails=none",
    ):
        assert flag in given


def entry(time_us: float, registers: int, **configuration: int | str) -> Entry:
    return Entry(configuration, Measurement("ok", samples_us=(time_us,), registers=registers))


def test_the_pareto_front_has_what_nothing_beats_in_both() -> None:
    found = [entry(3, 10), entry(1, 40), entry(2, 40), entry(2, 20), entry(5, 10), Entry({}, Measurement("hang"))]
    front = [(one.time_us, one.measurement.registers) for one in pareto(found, "registers")]
    assert front == [(1, 40), (2, 20), (3, 10)]


def test_a_heat_map_has_the_best_of_each_pair_and_holes() -> None:
    found = [entry(3, 1, a=1, b=2, c=1), entry(2, 1, a=1, b=2, c=2), entry(9, 1, a=4, b=8, c=1), entry(1, 1, a=9)]
    assert grid(found, "a", "b") == ([1, 4], [2, 8], [[2, None], [None, 9]])


def test_the_page_has_measurements_from_before_a_parameter_was_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    testing = pytest.importorskip("streamlit.testing.v1")
    with Database(tmp_path / "tune.sqlite") as database:
        for time_us, configuration in ((3, {"A": 1}), (4, {"A": 2}), (1, {"A": 1, "B": 1}), (2, {"A": 2, "B": 2})):
            database.put(Key("gpu", "k", "f", "n=1"), configuration, Measurement("ok", samples_us=(time_us,)))
    settings = {"database": str(tmp_path / "tune.sqlite"), "files": [], "directory": str(tmp_path)}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    monkeypatch.setenv(_serve.SETTINGS, str(tmp_path / "settings.json"))
    source = Path(_serve.__file__).with_name("_app.py")
    page = testing.AppTest.from_file(str(source), default_timeout=PATIENCE_S).run()
    assert not page.exception and not page.error
    assert "4" in [one.value for one in page.metric]


def test_files_are_told_by_their_content(tmp_path: Path) -> None:
    recording(small()).save(tmp_path / "small.npz")
    assert open_file(tmp_path / "small.npz")[0] == "recording"
    layer = tmp_path / "layer.json"
    layer.write_text('{"kernels": [{"kernel": "layernorm", "baseline_us": 20, "tuned_us": 10}]}')
    assert open_file(layer)[1] == layers(layer.read_text())
    for name, text in (("a.json", "{}"), ("b.json", "[]"), ("c.json", "no"), ("d.npz", "no"), ("e.txt", "no")):
        (tmp_path / name).write_text(text)
        with pytest.raises(Error):
            open_file(tmp_path / name)
    with pytest.raises(ConfigError):
        layers('{"kernels": [{"kernel": "x", "baseline_us": 0, "tuned_us": 1}]}')


def test_plots_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    from cudasched.tune.dashboard import _plots

    found = recorded(recording(small()))
    made = [
        _plots.heat_map(found, "THREADS", "VECTOR"),
        _plots.pareto_plot(found, "registers"),
        _plots.progress({"one": [3.0, 2.0], "other": [float("inf"), 1.0]}),
        _plots.layer_bars(layers('{"kernels": [{"kernel": "x", "baseline_us": 2, "tuned_us": 1}]}')),
        _plots.pareto_plot([], "registers"),
    ]
    # Guards against figures of gigabytes: what is drawn of thousands is bounded.
    many = [Layer(f"kernel {i}", 1.0 + i, 1.0) for i in range(3000)]
    made.append(_plots.layer_bars(many))
    assert [label.get_text() for label in made[-1].axes[0].get_yticklabels()][:2] == ["kernel 2999", "kernel 2998"]
    made.append(_plots.heat_map([entry(1 + i, 1, a=i % 60, b=i // 60) for i in range(3600)], "a", "b"))
    # Guards against names that matplotlib takes for formulas and cannot read, as of Clang's lambdas.
    made.append(_plots.layer_bars([Layer("run<a::$_{0}, b::$_{>", 2.0, 1.0)]))
    made.append(_plots.heat_map([entry(1 + i, 1, a=f"$_{{{i}$", b=i) for i in range(2)], "a", "b"))
    for figure in made:
        assert figure.get_size_inches().max() <= 30
    for figure in made:
        figure.savefig(io.BytesIO())


@pytest.fixture
def page(tmp_path: Path, command: str, no_driver: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address, with the token, of a dashboard of a synthetic space."""
    pytest.importorskip("streamlit")
    recording(small()).save(tmp_path / "small.npz")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    layer = {"kernels": [{"kernel": name, "baseline_us": 20, "tuned_us": us} for name, us in (("a", 9), ("b", 16))]}
    (tmp_path / "layer.json").write_text(json.dumps(layer))
    given = [command, "dashboard", "small.npz", "layer.json", "--port", str(port), "--database", "tune.sqlite"]
    process = subprocess.Popen(given, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split(": ", 1)[1].strip(), process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


def wait_for(address: str) -> None:
    """Until the page can be had."""
    for _ in range(PATIENCE_S * 5):
        try:
            urllib.request.urlopen(f"{address}_stcore/health", timeout=PATIENCE_S)
            return
        except urllib.error.URLError:
            signal.sigtimedwait([], 0.2)
    pytest.fail(f"{address} does not answer")


def click(browser: Browser, text: str) -> None:
    """A button or tab by its text."""
    found = f"[...document.querySelectorAll('button,[role=tab]')].find((one) => one.innerText.trim() === '{text}')"
    browser.wait_for(f"{found} !== undefined")
    browser.evaluate(f"{found}.click()")


def shows(browser: Browser, text: str) -> None:
    browser.wait_for(f"(document.body?.innerText ?? '').includes({json.dumps(text)})")


def labelled(selector: str, text: str) -> str:
    """JavaScript of the element with a text."""
    return f"[...document.querySelectorAll('{selector}')].find((one) => one.innerText.trim() === {json.dumps(text)})"


def chosen(parameter: str) -> str:
    """JavaScript of how many values of a range are taken."""
    return f"({multiselect(parameter)}?.innerText ?? '').trim().split(/\\s+/).length - 1"


def multiselect(parameter: str) -> str:
    """JavaScript of the element that chooses them."""
    boxes = "[...document.querySelectorAll('[data-testid=stMultiSelect]')]"
    return f"{boxes}.find((one) => one.innerText.startsWith('{parameter}'))"


def opened(directory: Path) -> dict[Path, str]:
    """What the page opens beside recordings, and what it then shows."""
    data = ROOT / "training" / "data" / "h200_sm_counts.parquet"
    report = advise(data)
    (directory / "report.json").write_text(report.model_dump_json())
    shown = f"{report.launches:,} launches on {report.gpu}"
    return {directory / "layer.json": "The whole layer", directory / "report.json": shown, data: shown}


@pytest.mark.skipif(FOUND is None, reason="needs Chromium: apt-get install chromium")
def test_in_a_browser_a_space_is_tuned_and_looked_at(page: tuple[str, subprocess.Popen[str]], tmp_path: Path) -> None:
    address, _ = page
    pictures = Path(PICTURES) if PICTURES else tmp_path
    wait_for(address)
    browser = Browser(tmp_path / "profile", 1400, 2200)
    try:
        browser.open(address)
        shows(browser, "A recorded space")
        click(browser, "Run")
        shows(browser, "100 configurations were tried")
        shows(browser, "The last run: small")
        shows(browser, "Pareto front")
        browser.wait_for("document.querySelectorAll('img').length >= 3")
        browser.picture(pictures / "dashboard-tune.png")
        for tab, text in (("Runs", "Compare"), ("Measurements", "without a time, and why"), ("Files", "synthetic")):
            click(browser, tab)
            shows(browser, text)
            browser.picture(pictures / f"dashboard-{tab.lower()}.png")
        files = "[...document.querySelectorAll('input[type=file]')]"
        for path, text in opened(tmp_path).items():
            browser.upload(f"{files}.at(-1)", path)
            browser.wait_for(f"[...document.querySelectorAll('input')].some((one) => one.value === '{path.name}')")
            shows(browser, text)
            # What was there before is pale until the page is whole.
            browser.wait_for("document.querySelector('[data-stale=true]') === null")
            browser.picture(pictures / f"dashboard-{path.suffix[1:]}-{path.stem}.png")

        # A kernel, of whose ranges one value is taken away; there is no GPU to run it on.
        click(browser, "Tune")
        browser.evaluate(f"{labelled('label', 'A kernel, on the GPU of this machine')}.click()")
        browser.wait_for(f"{files}.length === 3")
        (tmp_path / "scale.cu").write_text('extern "C" __global__ void scale(float* y, const float* x) {}\n')
        (tmp_path / "scale.toml").write_text(SMALL)
        for place, name in enumerate(("scale.cu", "scale.toml")):
            browser.upload(f"{files}[{place}]", tmp_path / name)
            shows(browser, name)
        shows(browser, "Ranges")
        browser.wait_for(f"{chosen('UNROLL')} === 4")
        browser.evaluate(f"{multiselect('UNROLL')}.querySelector('input').focus()")
        for kind in ("keyDown", "keyUp"):
            browser.ask("Input.dispatchKeyEvent", type=kind, key="Backspace", code="Backspace", windowsVirtualKeyCode=8)
        browser.wait_for(f"{chosen('UNROLL')} === 3")
        browser.picture(pictures / "dashboard-ranges.png")
        click(browser, "Run")
        shows(browser, "nothing can be measured here")
        browser.picture(pictures / "dashboard-kernel.png")
        assert "Traceback" not in browser.evaluate("document.body.innerText") and browser.errors == []
    finally:
        browser.close()


def test_without_the_token_there_is_nothing_and_nothing_is_taken_in(page: tuple[str, subprocess.Popen[str]]) -> None:
    """Guards against uploads that visitors without the token left in memory."""
    address, _ = page
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
    wait_for(address)
    bare, _, token = address.rstrip("/").rpartition("/")
    for place in ("", token[:-1], f"{token}x", "%2e%2e"):
        for path in ("", "_stcore/health", "_stcore/host-config", "_stcore/stream", "_stcore/upload_file/a/b"):
            for method in ("GET", "PUT", "POST"):
                where = "/".join(filter(None, (bare, place, path)))
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(
                        urllib.request.Request(where, b"x" * 1000, method=method), timeout=PATIENCE_S
                    )
                assert refused.value.code in (400, 404, 405), (where, method)
                assert token not in refused.value.read().decode()


def streamlit_of(process: subprocess.Popen[str]) -> int:
    """The page's process."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_page_ends_with_its_command_however_that_ends(
    number: signal.Signals, page: tuple[str, subprocess.Popen[str]]
) -> None:
    """Guards against a page that outlived its command and its terminal."""
    address, process = page
    wait_for(address)
    child = streamlit_of(process)
    assert address.split("/")[3] not in Path(f"/proc/{child}/cmdline").read_text()  # which anybody can read
    process.send_signal(number)
    assert process.wait(PATIENCE_S) in (130, -signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{child}").exists())
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=5)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's module, without a page."""
    streamlit = pytest.importorskip("streamlit")
    monkeypatch.setattr(streamlit, "set_page_config", lambda **_: (_ for _ in ()).throw(InterruptedError))
    source = Path(_serve.__file__).with_name("_app.py")
    spec = importlib.util.spec_from_file_location("page", source)
    assert spec is not None and spec.loader is not None
    app = importlib.util.module_from_spec(spec)
    with pytest.raises(InterruptedError):
        spec.loader.exec_module(app)
    return app


def test_an_upload_with_any_name_is_taken(app: Any) -> None:
    """Guards against files that were left out without a word, such as a browser's second download of one name."""
    assert app._plain("report (1).json") == "report__1_.json"
    assert app._plain("../Größe.npz") == "Gr__e.npz"
    assert app._plain("x" * 300 + ".cu") == "x" * 97 + ".cu"


def test_what_two_sessions_upload_is_kept_apart(app: Any, tmp_path: Path) -> None:
    """Guards against a kernel of one session that another session compiles, under the same name."""
    first = app._kept(tmp_path, {"kernel.cu": b"first", "space.toml": b"same"})
    second = app._kept(tmp_path, {"kernel.cu": b"second", "space.toml": b"same"})
    assert first != second and app._kept(tmp_path, {"kernel.cu": b"first", "space.toml": b"same"}) == first
    assert [(place / "kernel.cu").read_bytes() for place in (first, second)] == [b"first", b"second"]
