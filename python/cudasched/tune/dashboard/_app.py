"""The page. Streamlit runs this file for each visitor and after each click."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cudasched.errors import Error
from cudasched.tune import Live, Settings, Space, as_header, run
from cudasched.tune._need import need
from cudasched.tune.dashboard import _data, _plots
from cudasched.tune.dashboard._data import Entry
from cudasched.tune.dashboard._serve import SETTINGS
from cudasched.tune.database import Database, Key, default_path
from cudasched.tune.recording import Recording, Replay
from cudasched.tune.search import STRATEGIES
from cudasched.tune.tuner import Evaluator, Progress

st: Any = need("streamlit", "the dashboard", "'cudasched[dashboard]'")
_SHOWN = 200


def _settings() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(os.environ[SETTINGS]).read_text())
    return found


def _table(found: Sequence[Entry]) -> None:
    rows = [one.row() for one in found[:_SHOWN]]
    st.dataframe(rows, hide_index=True, width="stretch")
    if len(found) > _SHOWN:
        st.caption(f"The first {_SHOWN} of {len(found)}.")


def _show(found: Sequence[Entry], key: str) -> None:
    """Heat map, Pareto plot, and the configurations with their logs."""
    timed = [one for one in found if one.time_us is not None]
    if not timed:
        st.warning("No configuration has a time.")
        _table(found)
        return
    best = timed[0]
    first, second, third = st.columns(3)
    first.metric("Best time", f"{best.time_us:.2f} us")
    second.metric("Configurations", len(found))
    third.metric("Without a time", len(found) - len(timed))
    st.code(" ".join(f"{name}={value}" for name, value in best.configuration.items()), language=None, wrap_lines=True)
    names = [name for name in best.configuration if len({one.configuration.get(name) for one in found}) > 1]
    left, right = st.columns(2)
    with left:
        st.subheader("Configuration against time")
        if len(names) > 1:
            one, other = st.columns(2)
            x = one.selectbox("Across", names, index=0, key=f"{key}-x")
            y = other.selectbox("Down", [name for name in names if name != x], index=0, key=f"{key}-y")
            st.pyplot(_plots.heat_map(found, x, y))
            st.caption("The best time of each pair, us; darker is slower.")
    with right:
        st.subheader("Pareto front")
        what = st.selectbox(
            "Time against", ["registers", "unused occupancy", "workspace", "shared memory"], key=f"{key}-cost"
        )
        st.pyplot(_plots.pareto_plot(found, what))
        st.caption("No configuration is better than a blue one in both.")
    st.subheader("Best configurations")
    _table(timed)
    failed = [one for one in found if one.time_us is None]
    if failed:
        with st.expander(f"{len(failed)} configurations without a time, and why"):
            _table(failed)


def _tune(settings: dict[str, Any], database: Database) -> None:
    st.header("Tune")
    _search(settings, database)
    _last()


def _search(settings: dict[str, Any], database: Database) -> None:
    source = st.radio("Source", ["A recorded space", "A kernel, on the GPU of this machine"], horizontal=True)
    recordings = [Path(path) for path in settings["files"] if path.endswith(".npz")]
    kernel = space = None
    if source == "A recorded space":
        if not recordings:
            st.info(
                "A recorded space is tuned without a GPU. `cudasched dashboard FILE.npz` offers one here; "
                "`benchmarks/tune/recorded` in a clone has some, and `python -m benchmarks.tune record` makes one."
            )
            uploaded = st.file_uploader("Recorded space", type=["npz"])
            if uploaded is None:
                return
            name = _plain(uploaded.name)
            recordings = [_kept(Path(settings["directory"]), {name: uploaded.getvalue()}) / name]
        chosen = st.selectbox("Space", recordings, format_func=lambda path: path.stem)
    else:
        left, right = st.columns(2)
        kernel = left.file_uploader("Kernel", type=["cu"], help="It is compiled and run on this machine.")
        space = right.file_uploader("Space", type=["toml"])
        chosen = None
    left, middle, right = st.columns(3)
    strategy = left.selectbox("Search", list(STRATEGIES))
    evaluations = middle.number_input("Configurations", 1, 100_000, 100)
    seed = right.number_input("Seed", 0, 1_000_000, 0)
    restricted: Space | None = None
    if space is not None:
        restricted = _ranges(space, kernel, Path(settings["directory"]))
    if not st.button("Run", type="primary", disabled=chosen is None and restricted is None):
        return
    wanted = Settings(strategy=strategy, evaluations=int(evaluations), seed=int(seed))
    if chosen is not None:
        _run(Replay(Recording.load(chosen), int(seed)), wanted, database, chosen.stem)
    elif restricted is not None and restricted.source is not None:
        with contextlib.ExitStack() as held:
            with st.spinner("Waiting for the GPU, on which another page tunes"):
                held.enter_context(_data.GPU)
            with st.spinner("Preparing the GPU"):
                live = held.enter_context(Live(restricted, restricted.source))
            _run(live, replace(wanted, batch=4), database, restricted.kernel)


def _ranges(uploaded: Any, kernel: Any, directory: Path) -> Space | None:
    """The uploaded space with the values that are ticked."""
    if kernel is None:
        st.info("Upload the kernel, too.")
        return None
    name = _plain(kernel.name)
    text = uploaded.getvalue().decode("utf-8", errors="replace")
    place = _kept(directory, {name: kernel.getvalue(), "space.toml": text.encode()})
    space = Space(text, place / "space.toml")
    space.source = place / name
    with st.expander("Ranges", expanded=True):
        columns = st.columns(3)
        for i, (parameter, values) in enumerate(list(space.parameters.items())):
            chosen = columns[i % 3].multiselect(parameter, values, default=values, key=f"range-{parameter}")
            if chosen:
                space.parameters[parameter] = tuple(chosen)
    return space


def _plain(name: str) -> str:
    """Of the visitor's name for a file, the last part in plain characters."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", Path(name).name)[-100:]


def _kept(directory: Path, files: dict[str, bytes]) -> Path:
    """A directory of uploaded files, named by content: no session changes another one's files."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)} ".encode() + content)
    place = directory / digest.hexdigest()[:24]
    if not place.exists():
        new = Path(tempfile.mkdtemp(dir=directory))
        for name, content in files.items():
            (new / name).write_bytes(content)
        with contextlib.suppress(OSError):  # another session has uploaded the same meanwhile
            new.rename(place)
    return place


def _run(evaluator: Evaluator, settings: Settings, database: Database, name: str) -> None:
    bar = st.progress(0.0, text="Searching")
    left = st.columns(2)[0]
    plot = left.empty()
    trace: list[float] = []

    def note(progress: Progress) -> None:
        done = progress.evaluations / settings.evaluations
        best = "" if progress.best_us is None else f", best {progress.best_us:.2f} us"
        bar.progress(min(done, 1.0), text=f"{progress.evaluations} configurations{best}")
        if progress.best_us is not None:
            trace.append(progress.best_us)
        if progress.evaluations % max(1, settings.evaluations // 20) == 0 and trace:
            plot.pyplot(_plots.progress({name: trace}))

    tuned = run(evaluator, settings, database=database, on_progress=note)
    bar.progress(1.0, text=f"{tuned.evaluations} configurations were tried, best {tuned.time_us:.2f} us")
    plot.pyplot(_plots.progress({name: tuned.trace}))
    configurations = tuned.problem.configurations
    found = [Entry(configurations[index], made) for index, made in tuned.measurements.items()]
    st.session_state["last"] = (name, sorted(found, key=lambda one: one.time_us or float("inf")), as_header(tuned))


def _last() -> None:
    if "last" in st.session_state:
        name, found, header = st.session_state["last"]
        st.subheader(f"The last run: {name}")
        st.download_button("Header of the best configuration", header, file_name=f"{name}_tuned.h")
        _show(found, "last")


def _runs(_: dict[str, Any], database: Database) -> None:
    st.header("Runs")
    runs = database.runs()
    if not runs:
        st.info("No run is in the database yet.")
        return
    rows = [
        {
            "run": one.run,
            "kernel": one.key.kernel,
            "shape": one.key.shape,
            "GPU": one.key.gpu,
            "search": one.strategy,
            "seed": one.seed,
            "configurations": one.evaluations,
            "best us": one.best_us,
            "ended": one.ended is not None,
        }
        for one in runs
    ]
    st.dataframe(rows, hide_index=True, width="stretch")
    by_number = {one.run: one for one in runs}
    picked = st.multiselect("Compare", list(by_number), default=list(by_number)[:2], max_selections=6)
    if picked:
        traces = {f"run {number}: {by_number[number].strategy}": by_number[number].trace for number in picked}
        left = st.columns(2)[0]
        left.pyplot(_plots.progress(traces))


def _known(_: dict[str, Any], database: Database) -> None:
    st.header("Measurements")
    keys: list[Key] = database.keys()
    if not keys:
        st.info("No measurement is in the database yet.")
        return
    key = st.selectbox("Of", keys, format_func=lambda one: f"{one.kernel} {one.shape} on {one.gpu}")
    _show(_data.entries(database, key), "known")


def _files(settings: dict[str, Any], _: Database) -> None:
    st.header("Files")
    paths = [Path(path) for path in settings["files"]]
    uploaded = st.file_uploader("Open a report, a data set, a recording or a layer", type=["npz", "json", "parquet"])
    if uploaded is not None:
        name = _plain(uploaded.name)
        paths.insert(0, _kept(Path(settings["directory"]), {name: uploaded.getvalue()}) / name)
    if not paths:
        st.info("`cudasched dashboard FILE...` offers files here.")
        return
    path = st.selectbox("File", paths, format_func=lambda one: one.name)
    kind, content = _data.open_file(path)
    if kind == "recording":
        if content.is_synthetic:
            st.warning("A synthetic space, for tests: its times are of no GPU.")
        _show(_data.recorded(content), "file")
    elif kind == "layer":
        total = sum(one.baseline_us for one in content) / sum(one.tuned_us for one in content)
        st.metric("The whole layer", f"{total:.2f} times as fast")
        left = st.columns(2)[0]
        left.pyplot(_plots.layer_bars(content))
        if len(content) > _plots.MOST_BARS:
            left.caption(f"The {_plots.MOST_BARS} kernels that took longest, of {len(content):,}.")
    else:
        st.subheader(f"{content.launches:,} launches on {content.gpu}")
        rows = [
            {
                "kernel": one.name,
                "share, %": round(100 * one.share, 1),
                "launches": one.launches,
                "mean us": round(one.mean_ns / 1e3, 1) if one.mean_ns is not None else None,
                "occupancy, %": round(100 * one.occupancy, 1) if one.occupancy is not None else None,
                "advice": "; ".join(finding.recommendation for finding in one.findings),
            }
            for one in content.kernels[:_SHOWN]
        ]
        st.dataframe(rows, hide_index=True, width="stretch")


def main() -> None:
    """The page."""
    st.set_page_config(page_title="cudasched: tuning", layout="wide")
    st.title("Tuning")
    settings = _settings()
    with Database(settings["database"] or default_path()) as database:
        tabs = st.tabs(["Tune", "Runs", "Measurements", "Files"])
        for tab, page in zip(tabs, (_tune, _runs, _known, _files), strict=True):
            with tab:
                try:
                    page(settings, database)
                except (Error, OSError) as error:
                    st.error(str(error))


main()
