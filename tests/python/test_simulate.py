"""Simulations of recorded programs: traces, policies of Python, the comparison with what was measured, the command."""

from __future__ import annotations

import json
import random
import signal
import sys
from pathlib import Path
from typing import Any

import parquet_recordings as recordings
import pytest
from cudasched import ConfigError, Error, simulate
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Run

MS = 1_000_000


def steps(seed: int = 1, launches: int = 300, gap_ns: int = 12_000, longest_us: float = 200) -> simulate.Trace:
    """A training step over and over, whose host waits for the GPU at the end of each."""
    chance = random.Random(seed)
    submitted, started, took = [], [], []
    host = gpu = 0
    for step in range(2):
        for _ in range(launches):
            submitted.append(host)
            start = max(host + 3_000, gpu + 1_300)
            duration = round(chance.uniform(2, longest_us) * 1e3)
            started.append(start)
            took.append(duration)
            host, gpu = host + gap_ns, start + duration
        host = max(host, gpu + 5_000) + step
    return simulate.trace_of(submitted, started, took, name="steps", load="transformer")


def served(trace: simulate.Trace, **options: Any) -> simulate.Client:
    return simulate.latency(trace, **{"rate_hz": 60, "seconds": 2, "slo_ms": 5, **options})


def row_of(rows: list[simulate.Row], arm: str) -> simulate.Row:
    return next(row for row in rows if row.arm == arm)


def test_a_request_of_several_graphs_ends_where_the_gpu_has_nothing() -> None:
    # Tokens of 1.3 ms, three a request, each read by the host before the next; the server slept between requests.
    submitted = [request * 20_000_000 + token * 1_350_000 for request in range(10) for token in range(3)]
    started: list[int | None] = [at + 5_000 for at in submitted]

    def latency_alone(**options: Any) -> simulate.Row:
        trace = simulate.trace_of(submitted, started, [1_300_000] * 30, **options)
        return simulate.compare([served(trace, arrivals="periodic", rate_hz=40)], [simulate.Arm()])[0]

    alone = latency_alone(requests=True)
    assert alone.latency_ms and alone.latency_ms.p99 == pytest.approx(1.3, abs=0.02)
    alone = latency_alone(request_gap_ms=5)
    assert alone.latency_ms.p50 == alone.latency_ms.p99 == pytest.approx(4.0, abs=0.05)


def test_policies_have_names_and_the_default_comes_first() -> None:
    known = simulate.policies()
    assert list(known) == ["strict", "slack", "harvest", "open"]
    assert all(known.values())


def test_arms_are_compared_with_those_alone() -> None:
    clients = [served(simulate.request(0.48)), simulate.best_effort(steps())]
    arms = [simulate.Arm("open", offload=False), simulate.Arm("strict"), simulate.Arm("strict", lead_us="auto")]
    rows = simulate.compare(clients, arms, seconds=2)
    assert [row.arm for row in rows] == [
        "latency alone",
        "best effort alone",
        "open",
        "strict, lead 20 us",
        "strict, lead auto",
    ]
    alone, bare, unmanaged, strict, adaptive = rows
    assert alone.latency_ms and unmanaged.latency_ms and strict.latency_ms
    assert alone.best_effort_ratio is None and alone.lead_us is None and alone.policy is None
    assert alone.latency_ms.p50 == pytest.approx(0.484, abs=0.001)
    assert bare.latency_ms is None and bare.best_effort_ratio == 1
    assert alone.latency_ms.p99 <= strict.latency_ms.p99 < unmanaged.latency_ms.p99
    assert strict.attainment == 1
    assert strict.lead_us == pytest.approx(20)
    assert adaptive.lead_us and 10 <= adaptive.lead_us <= 40
    for row in (strict, adaptive):
        assert row.best_effort_ratio and 0.85 < row.best_effort_ratio < 1.1
        assert row.utilisation <= 1 and row.launches > 1_000
    assert simulate.compare(clients, arms[1:2], seconds=2)[2] == strict


def test_slack_is_known_once_requests_were_seen() -> None:
    trace = simulate.trace_of([i * 4_000 for i in range(10)], [None] * 10, [600_000] * 10, name="decode")
    decode = served(trace, rate_hz=120, seconds=2, arrivals="periodic", slo_ms=30)
    seen: list[int | None] = []

    def watching(snapshot: Any) -> Any:
        seen.append(snapshot.slack_ns)
        return "latency" if snapshot.latency_active else None

    simulate.compare([decode, simulate.best_effort(steps())], [simulate.Arm(watching, sharing="mps")], seconds=1)
    known = [slack for slack in seen if slack is not None]
    assert known and 20 * MS < max(known) < 30 * MS  # 30 ms less one request
    assert None in seen[:10]


def test_slack_lets_best_effort_into_long_requests() -> None:
    trace = simulate.trace_of([i * 4_000 for i in range(14)], [None] * 14, [500_000] * 14, name="decode")
    clients = [
        served(trace, rate_hz=60, seconds=3, arrivals="periodic", slo_ms=15),
        simulate.best_effort(steps(longest_us=100)),
    ]
    strict, slack = simulate.compare(clients, [simulate.Arm("strict"), simulate.Arm("slack")], seconds=3)[2:]
    assert strict.latency_ms and slack.latency_ms
    assert strict.attainment == 1 and slack.attainment and slack.attainment >= 0.99
    assert slack.latency_ms.p50 > strict.latency_ms.p50 + 1


def politely(snapshot: Any) -> Any:
    if snapshot.latency_active:
        return "latency"
    if not snapshot.my_turn:
        return "turn"
    return snapshot.in_flight_ns or None


def test_a_policy_may_be_a_function() -> None:
    clients = [served(simulate.request(0.48)), simulate.best_effort(steps())]
    rows = simulate.compare(clients, [simulate.Arm(politely), simulate.Arm("strict", lead_us=0)], seconds=1)
    own, strict = rows[2:]
    assert own.policy == "politely" and own.policy_refused == ""
    assert own.latency_ms and strict.latency_ms
    assert own.latency_ms.p50 < 2 * strict.latency_ms.p50


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (0, "not above 0"),
        (-5, "not above 0"),
        (2_000 * MS, "more than a second"),
        ("fifo", "does not exist"),
        (1.5, "does not exist"),
        ("turn", "a turn that it has"),
    ],
)
def test_an_answer_without_meaning_falls_open(answer: Any, says: str) -> None:
    clients = [served(simulate.request(0.48)), simulate.best_effort(steps())]
    row = simulate.compare(clients, [simulate.Arm(lambda snapshot: answer)], seconds=0.5)[2]
    assert says in row.policy_refused
    assert row.best_effort_ratio and row.best_effort_ratio > 0.5


def test_what_a_policy_raises_comes_out() -> None:
    clients = [served(simulate.request(0.48)), simulate.best_effort(steps())]

    def broken(snapshot: Any) -> None:
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        simulate.compare(clients, [simulate.Arm(broken)], seconds=0.2)


def test_a_signal_ends_a_simulation() -> None:
    """Of an hour, with C++ alone at work."""

    def stop(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(InterruptedError):
            simulate.run([simulate.best_effort(steps())], simulate.Arm("open"), seconds=3600)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@settings(max_examples=25, deadline=None)
@given(
    sharing=st.sampled_from(["one_process", "mps", "two_processes"]),
    policy=st.sampled_from(["strict", "slack", "harvest", "open"]),
    lead_us=st.one_of(st.just("auto"), st.floats(0, 300)),
    offload=st.booleans(),
    rate_hz=st.floats(1, 150),
    request_ms=st.floats(0.01, 3),
    seed=st.integers(0, 2**32),
)
def test_any_arm_makes_progress(
    sharing: Any, policy: str, lead_us: Any, offload: bool, rate_hz: float, request_ms: float, seed: int
) -> None:
    server = served(simulate.request(request_ms), rate_hz=rate_hz, seconds=0.4, seed=seed)
    arm = simulate.Arm(policy, lead_us=lead_us, sharing=sharing, offload=offload)
    alone, bare, row = simulate.compare([server, simulate.best_effort(steps(seed))], [arm], seconds=0.5, seed=seed)
    assert row.best_effort_per_s and bare.best_effort_per_s
    assert row.best_effort_per_s <= 1.25 * bare.best_effort_per_s
    if row.latency_ms and alone.latency_ms and row.latency_ms.n == alone.latency_ms.n:
        assert row.latency_ms.mean >= 0.999 * alone.latency_ms.mean


# ---- traces --------------------------------------------------------------------------------------------------------


def test_a_trace_says_what_it_holds() -> None:
    trace = simulate.trace_of([0, 10_000], [3_000, None], [5_000, 7_000], name="two")
    assert (trace.launches, trace.gpu_ms, trace.ends) == (2, pytest.approx(0.012), (2,))
    assert simulate.request(0.5).ends == (1,)


@pytest.mark.parametrize("columns", [([], [], []), ([1, 2], [1], [1, 2]), ([1], [None], [])])
def test_traces_without_meaning_are_refused(columns: Any) -> None:
    with pytest.raises(ConfigError):
        simulate.trace_of(*columns)


@pytest.mark.parametrize(
    "options",
    [
        {"rate_hz": 0},
        {"arrivals": "now and then"},
        {"slo_ms": 0},
        {"slo_ms": float("nan")},
        {"prepare_ms": -1},
        {"expect_ms": float("inf")},
    ],
)
def test_servers_without_meaning_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError):
        served(simulate.request(0.5), **options)


def test_time_slices_of_best_effort_are_its_own() -> None:
    """As beside the driver's slices, where a request waits for 2 ms of the others, and without a gate."""
    training = simulate.best_effort(steps(launches=20, longest_us=20_000))
    arms = [simulate.Arm("open", offload=False, time_slice_us=us) for us in (None, 1)]
    alone, _, plain, own = simulate.compare([served(simulate.request(0.48)), training], arms, seconds=2)
    assert (plain.arm, own.arm) == ("open", "time slices of 1 us")
    assert alone.latency_ms and plain.latency_ms and own.latency_ms
    # A change of contexts, and cold caches.
    assert own.latency_ms.p50 == pytest.approx(alone.latency_ms.p50 + 0.13 + 0.06, abs=0.02)
    assert plain.latency_ms.p50 > own.latency_ms.p50 + 0.5
    assert own.best_effort_ratio and own.best_effort_ratio > 0.9


def test_long_time_slices_of_a_server_spare_its_requests_changes_of_contexts() -> None:
    """A request of five slices of the driver's: five changes to best effort and back, or none but the first."""
    training = simulate.best_effort(steps(launches=20, longest_us=20_000))
    arms = [simulate.Arm("open", offload=False, time_slice_us=1, latency_slice_us=us) for us in (None, 20_000)]
    clients = [served(simulate.request(11), rate_hz=20), training]
    alone, _, short, long = simulate.compare(clients, arms, seconds=4)
    assert (short.arm, long.arm) == ("time slices of 1 us", "time slices of 1 us, of the server 20000 us")
    assert alone.latency_ms and short.latency_ms and long.latency_ms
    assert long.latency_ms.p50 == pytest.approx(alone.latency_ms.p50 + 0.13 + 0.06, abs=0.1)
    assert short.latency_ms.p50 > long.latency_ms.p50 + 4 * 0.26
    assert long.best_effort_ratio and short.best_effort_ratio and long.best_effort_ratio > short.best_effort_ratio


@pytest.mark.parametrize(
    "arm",
    [
        simulate.Arm("fifo"),
        simulate.Arm(lead_us="small"),
        simulate.Arm(lead_us=-1),
        simulate.Arm(lead_us=float("nan")),
        simulate.Arm(linger_us=-1),
        simulate.Arm(prediction_sigma=-1),
        simulate.Arm(time_slice_us=-1),
        simulate.Arm(latency_slice_us=-1),
        simulate.Arm(sharing="cloud"),  # type: ignore[arg-type]
    ],
)
def test_arms_without_meaning_are_refused(arm: simulate.Arm) -> None:
    with pytest.raises(ConfigError):
        simulate.compare([simulate.best_effort(steps())], [arm], seconds=0.1)
    with pytest.raises(ConfigError):
        simulate.compare([simulate.best_effort(steps())], [], seconds=0.1)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    pytest.importorskip("pyarrow")
    return recordings.training(tmp_path)


# ---- what was measured ---------------------------------------------------------------------------------------------


def results(tmp_path: Path, **changes: Any) -> Path:
    row = {
        "arm": "cudasched_two_processes",
        "latency_load": "bert_graph",
        "best_effort_load": "transformer",
        "arrivals": "poisson",
        "rate_hz": 60.0,
        "policy": "strict",
        "lead_us": 20.0,
        "latency_ms": {"p50": 0.8, "p99": 1.2},
        "alone_ms": {"p50": 0.5, "p99": 0.6},
        "best_effort_ratio": 0.95,
        **changes,
    }
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"rows": [row, {"kind": "speed"}]}))
    return path


def test_errors_against_measured_figures_are_told(tmp_path: Path) -> None:
    clients = [served(simulate.request(0.48)), simulate.best_effort(steps())]
    rows = simulate.measured(results(tmp_path))
    assert len(rows) == 1
    compared = simulate.compare(clients, [simulate.Arm(), simulate.Arm(lead_us=60)], seconds=1, results=rows)
    figures = {one.what: one for one in compared[2].comparisons}
    assert list(figures) == ["P50 / alone", "P99 / alone", "best effort / alone"]
    p50 = figures["P50 / alone"]
    assert compared[2].latency_ms and compared[0].latency_ms
    assert p50.measured == pytest.approx(1.6)
    assert p50.simulated == pytest.approx(compared[2].latency_ms.p50 / compared[0].latency_ms.p50)
    assert p50.error == pytest.approx(p50.simulated / 1.6 - 1)
    assert compared[3].comparisons == ()  # another lead
    rows = simulate.measured(results(tmp_path, arm="cudasched_two_processes_slack", policy="slack"))
    compared = simulate.compare(clients, [simulate.Arm("slack"), simulate.Arm()], seconds=0.2, results=rows)
    assert (len(compared[2].comparisons), compared[3].comparisons) == (3, ())
    for other in ({"best_effort_load": "gemm"}, {"rate_hz": 30.0}, {"arrivals": "periodic"}, {"latency_ms": None}):
        rows = simulate.measured(results(tmp_path, **other))
        assert simulate.compare(clients, [simulate.Arm()], seconds=0.2, results=rows)[2].comparisons == ()


def test_other_files_are_no_results(tmp_path: Path) -> None:
    for text in ("", "[]", '{"rows": 3}', "{}", '{"rows": [{"latency_load": "mlp"}]}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(Error, match="no results file"):
            simulate.measured(tmp_path / "other.json")
    with pytest.raises(Error, match="cannot be read"):
        simulate.measured(tmp_path / "nowhere.json")


def test_the_shipped_results_are_read() -> None:
    from support import ROOT

    assert len(simulate.measured(ROOT / "benchmarks" / "results" / "colocation.json")) > 20


# ---- plot and command ----------------------------------------------------------------------------------------------


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    clients = [served(simulate.request(0.48)), simulate.best_effort(steps())]
    rows = simulate.compare(clients, [simulate.Arm()], seconds=0.3)
    path = tmp_path / "new" / "plot.png"
    simulate.plot(rows, path, "a simulation")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(Error, match="cannot be written"):
        simulate.plot(rows, tmp_path / "plot.docx", "a simulation")


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Error, match=r"cudasched\[plot\]"):
        simulate.plot([], tmp_path / "plot.png", "")


def test_the_command(cudasched: Run, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.py"
    own.write_text("def politely(snapshot):\n    return 'latency' if snapshot.latency_active else None\n")
    options = ["--slo-ms", "5", "--seconds", "1", "--lead-us", "20", "--measured", str(results(tmp_path))]
    done = cudasched("simulate", str(recorded), *options, "--policy", "strict", "--policy", f"{own}:politely", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)["data"]
    assert [row["arm"] for row in said["rows"]] == [
        "latency alone",
        "best effort alone",
        "strict, lead 20 us",
        "politely, lead 20 us",
    ]
    monkeypatch.setenv("COLUMNS", "140")
    done = cudasched("simulate", str(recorded), *options, "--load", "transformer", "--request-ms", "0.48")
    assert (done.returncode, done.stderr) == (0, "")
    assert "slack, lead 20 us" in done.stdout and "GPU busy" in done.stdout
    assert "time slices of 1 us" in done.stdout and "of the server 20000 us" in done.stdout
    assert "measured on the GPU" in done.stdout


def test_a_policy_may_keep_its_state_in_a_dataclass(cudasched: Run, recorded: Path) -> None:
    """Which looks for the module that it is defined in."""
    Path("policy.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
        "@dataclass\nclass Seen:\n    count: int = 0\n    most: ClassVar[int] = 9\nseen = Seen()\n"
        "def patient(snapshot):\n    seen.count += 1\n    return 'latency' if seen.count > Seen.most else None\n"
    )
    done = cudasched("simulate", str(recorded), "--policy", "policy.py:patient", "--seconds", "0.1")
    assert (done.returncode, done.stderr) == (0, "") and "patient, lead 20 us" in done.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--policy", "fifo"], "there are strict, slack, harvest, open"),
        (["--policy", "nowhere.py:f"], "nowhere.py:f"),
        (["--policy", "json:nothing"], "nothing"),
        (["--policy", "json:__name__"], "is no function"),
        (["--policy", "half.py:f"], "SyntaxError: "),
        (["--policy", "raises.py:f"], "ZeroDivisionError: division by zero"),
        (["--policy", "json:loads"], "json:loads: TypeError: "),
        (["--output", "plot.txt"], "ends in .png or .svg"),
        (["--lead-us", "small"], "a number of us, or auto"),
        (["--sharing", "cloud"], "there are two_processes, mps and one_process"),
        (["--arrivals", "daily"], "daily"),
        (["--latency-trace", "serve.parquet", "--request-ms", "4"], "--request-ms: the requests are those of"),
        (["--request-gap-ms", "4"], "--request-gap-ms: it is of the recording of --latency-trace"),
    ],
)
def test_the_command_refuses_what_has_no_meaning(cudasched: Run, recorded: Path, options: list[str], says: str) -> None:
    Path("half.py").write_text("def")
    Path("raises.py").write_text("1 / 0")
    done = cudasched("simulate", str(recorded), *options)
    assert done.returncode == 2
    assert says in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rate-hz", "nan"], "rate_hz = nan: must be a number from 0.001 to 100000"),
        (["--rate-hz", "1e12"], "rate_hz = 1000000000000.0: must be a number from"),
        (["--seed", "99999999999999999999999"], "seed = 99999999999999999999999: must be a number from 0 to"),
        (["--seconds", "1e300"], "seconds = 1e+300: must be a number from 0.001 to 3600"),
        (["--request-ms", "inf"], "gpu_ms = inf: must be a number from"),
        (["--rate-hz", "100000", "--seconds", "60"], "more than the 1000000 that are simulated"),
    ],
)
def test_numbers_beyond_their_limits_are_refused(cudasched: Run, recorded: Path, options: list[str], said: str) -> None:
    done = cudasched("simulate", str(recorded), *options)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
