"""The installed command, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import cudasched as package
import pytest
import typer
from cudasched.cli.app import application
from cudasched.cli.coverage import Report, find_cupti, read_reports, verdict
from cudasched.cli.run import plain
from support import PATIENCE_S, Run

LAUNCHER = str(Path(__file__).with_name("launcher.py"))


def one_line(text: str) -> str:
    assert len(text.splitlines()) == 1, text
    assert "Traceback" not in text
    return text


def executable(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    path.chmod(0o755)
    return str(path)


def elf(*, machine: int = 62, elf_class: int = 2, exit_code: int = 7) -> bytes:
    """A statically linked x86-64 program that exits with a code, or one that claims to be for something else."""
    code = b"\xb8\x3c\x00\x00\x00\xbf" + struct.pack("<I", exit_code) + b"\x0f\x05"  # exit(exit_code)
    base, start = 0x400000, 64 + 56
    identity = b"\x7fELF" + bytes([elf_class, 1, 1]) + bytes(9)
    header = identity + struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, base + start, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    size = start + len(code)
    return header + struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000) + code


# ---- the command ---------------------------------------------------------------------------------------------------


def test_version(cudasched: Run) -> None:
    done = cudasched("--version")
    assert (done.returncode, done.stderr) == (0, "")
    first, *others = done.stdout.splitlines()
    assert first == f"cudasched {package.__version__}"
    assert [line.split(":")[0] for line in others] == ["build", "driver", "models"]


def test_it_starts_without_what_only_some_commands_need(python: Run) -> None:
    slow = ("numpy", "pyarrow", "pydantic", "rich.console")
    load = "import sys; from cudasched.cli.app import application; application('')"
    done = python(f"{load}; print([name for name in {slow} if name in sys.modules])")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_command_starts_without_the_others(python: Run) -> None:
    load = "import sys; from cudasched.cli.app import application; application('trace')"
    done = python(f"{load}; print([name for name in ('trace', 'top') if f'cudasched.cli.{{name}}' in sys.modules])")
    assert (done.stdout, done.stderr) == ("['trace']\n", "")


def test_a_plain_run_starts_without_typer(python: Run, no_driver: Path) -> None:
    code = """
import sys
sys.modules["typer"] = None
sys.argv = ["cudasched", "run", "--class", "latency", "--", "sh", "-c", "exit 4"]
from cudasched.cli import main
main()
"""
    assert python(code).returncode == 4


@pytest.mark.parametrize(
    "line",
    [
        "run -- program",
        "run program --class latency -- x",
        "run --class latency -- program --class normal -- --help",
        "run --class latency --class normal --slo-ms -5 -- program",
        "run --name -- -- program",
        "run --priority 1 --policy slack --lead-us auto --job off --memory-limit 2GiB --name x program",
    ],
)
def test_a_plain_run_is_read_as_typer_reads_it(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], dict[str, str]]] = []

    def note(program: list[str], settings: dict[str, str | None], **_: object) -> int:
        calls.append((program, {field: value for field, value in settings.items() if value is not None}))
        return 0

    monkeypatch.setattr("cudasched.cli.run.run_program", note)
    typer.main.get_command(application("run")).main(line.split(), prog_name="cudasched", standalone_mode=False)
    assert [plain(line.split())] == calls


@pytest.mark.parametrize(
    "line",
    [
        "",
        "status",
        "run",
        "run --",
        "run --help",
        "run --class",
        "run --class latency",
        "run --class=latency program",
        "run --clas latency program",
        "run --json -- program",
        "run - program",
        "--version run program",
    ],
)
def test_what_is_no_plain_run_is_left_to_typer(line: str) -> None:
    assert plain(line.split()) is None


def test_as_a_module(cudasched: Run) -> None:
    command = [sys.executable, "-m", "cudasched", "run", "--class", "fast", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "unknown class" in one_line(done.stderr)


def test_help_names_the_commands(cudasched: Run) -> None:
    for arguments in ([], ["--help"]):
        done = cudasched(*arguments)
        assert done.returncode == 0
        for name in ("run", "status", "demo"):
            assert re.search(rf"\b{name}\b", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--class", "latancy", "--", "true"], "--class = 'latancy': unknown class, .*did you mean 'latency'"),
        (["run", "--slo-ms", "-5", "--", "true"], "--slo-ms = '-5'"),
        (["run", "--slo-ms", "nan", "--", "true"], "--slo-ms = 'nan'"),
        (["run", "--slo-ms", "fast", "--", "true"], "--slo-ms"),
        (["run", "--lead-us", "-1", "--", "true"], "--lead-us = '-1'"),
        (["run", "--priority", "1.5", "--", "true"], "--priority = '1.5'"),
        (["run", "--priority", "9", "--", "true"], "--priority = '9': must be an integer from -8 to 8"),
        (["run", "--name", "", "--", "true"], "--name = ''"),
        (["run", "--config", "missing.toml", "--", "true"], "missing.toml: cannot be read"),
        (["run", "--clas", "latency", "--", "true"], "No such option"),
        (["run"], "Missing argument"),
        (["launch"], "No such command"),
        (["demo", "--seconds", "inf"], "--seconds inf: the demo measures for 1 to 3600 s"),
        (["demo", "--seconds", "nan"], "--seconds nan"),
        (["demo", "--output", "d.txt"], r"--output d\.txt: name a file that ends in \.png or \.svg"),
    ],
)
def test_bad_usage_is_one_line_and_2(cudasched: Run, simulated: Path, arguments: list[str], said: str) -> None:
    done = cudasched(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(said, one_line(done.stderr))


@pytest.mark.parametrize("group", ["baseline", "metrics", "models", "torch"])
def test_a_group_alone_prints_its_help(cudasched: Run, group: str) -> None:
    done = cudasched(group)
    assert (done.returncode, done.stderr) == (2, "") and "Usage: " in done.stdout


def test_malformed_toml_names_line_and_key(cudasched: Run, no_driver: Path, tmp_path: Path) -> None:
    (tmp_path / "cudasched.toml").write_text('class = "latency"\nslo_ms = \n')
    for arguments in (["run", "--", "true"], ["status"]):
        done = cudasched(*arguments)
        assert done.returncode == 2
        assert f"{tmp_path / 'cudasched.toml'}, line 2, key 'slo_ms'" in one_line(done.stderr)


def test_a_bad_variable_is_an_error_of_the_command(cudasched: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_SLO_MS", "-1")
    done = cudasched("run", "--", "true")
    assert done.returncode == 2
    assert "CUDASCHED_SLO_MS = '-1'" in one_line(done.stderr)


# ---- programs that cannot be run -----------------------------------------------------------------------------------


def test_no_such_program(cudasched: Run, simulated: Path) -> None:
    for name in ("cudasched-no-such-program", "./no/such/program"):
        done = cudasched("run", "--", name)
        assert done.returncode == 127
        assert f"no such program: {name}" in one_line(done.stderr)


def test_a_script_without_its_interpreter_is_no_program_and_the_message_says_so(
    cudasched: Run, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("print()")
    monkeypatch.chdir(tmp_path)
    done = cudasched("run", "--", "train.py")
    assert done.returncode == 127
    assert "no such program: train.py; a file of this name is here: put its interpreter or ./" in one_line(done.stderr)


@pytest.mark.parametrize("driver", ["simulated", "no_driver"])
def test_programs_that_cannot_run(cudasched: Run, tmp_path: Path, driver: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(driver)
    plain = tmp_path / "plain"
    plain.write_text("x")
    cases = {
        str(tmp_path): "is a directory",
        str(plain): "is not executable",
        executable(tmp_path / "arm", elf(machine=183)): "made for arm64",
        executable(tmp_path / "old", elf(machine=3, elf_class=1)): "made for x86 .32 bits.",
        executable(tmp_path / "short", b"\x7fELF\x02\x01"): "damaged ELF",
        executable(tmp_path / "script", b"#!/no/such/interpreter -x\n"): "'/no/such/interpreter' does not exist",
        executable(tmp_path / "indirect", b"#!" + bytes(tmp_path) + b"/arm\n"): "made for arm64",
    }
    for program, said in cases.items():
        done = cudasched("run", "--", program)
        assert done.returncode == 126, program
        assert re.search(said, one_line(done.stderr)), program
    done = cudasched("run", "--", executable(tmp_path / "text", b"hello\n"))
    assert done.returncode == 126
    assert "neither an ELF program nor a script" in done.stderr.splitlines()[-1]


def test_a_statically_linked_program_runs_with_a_warning(cudasched: Run, simulated: Path, tmp_path: Path) -> None:
    program = executable(tmp_path / "static", elf(exit_code=7))
    done = cudasched("run", "--", program)
    assert done.returncode == 7
    assert "statically linked" in one_line(done.stderr) and "programs that it starts or becomes are" in done.stderr


# ---- without a driver ----------------------------------------------------------------------------------------------


def test_without_a_driver_the_program_runs_as_it_is(
    cudasched: Run, no_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "")
    for extra in ([], ["--check-coverage"], ["--class", "latency", "--slo-ms", "5"]):
        code = "import os, sys; print(os.environ.get('LD_PRELOAD', '')); sys.exit(9)"
        done = cudasched("run", *extra, "--", sys.executable, "-c", code)
        assert (done.returncode, done.stdout) == (9, "\n")
        assert "runs unmanaged" in one_line(done.stderr) and str(no_driver) in done.stderr
    done = cudasched("run", "--", executable(tmp_path / "static", elf(exit_code=3)))
    assert done.returncode == 3
    one_line(done.stderr)


# ---- with one ------------------------------------------------------------------------------------------------------


def test_an_unmodified_program_is_managed(cudasched: Run, simulated: Path) -> None:
    report = (
        "import launcher; gpu = launcher.Gpu(); gpu.launch(3); gpu.synchronize()\n"
        "import cudasched; s = cudasched.state(); print(s.launches, s.latency_launches, s.process_class, s.scheduling)"
    )
    done = cudasched("run", "--class", "latency", "--slo-ms", "5", "--", sys.executable, "-c", report)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3 3 latency True\n", "")
    done = cudasched("run", "--class", "best-effort", "--", sys.executable, LAUNCHER, "4")
    assert (done.returncode, done.stdout, done.stderr) == (0, "launched 4\n", "")


def test_the_settings_arrive_by_precedence(
    cudasched: Run, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.toml").write_text("priority = 1\nslo_ms = 2\nlead_us = 3\n")
    monkeypatch.setenv("CUDASCHED_SLO_MS", "20")
    monkeypatch.setenv("CUDASCHED_LEAD_US", "30")
    options = ["--config", "c.toml", "--lead-us", "300", "--name", "my program", "--class", "latency"]
    show = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('CUDASCHED')}))"
    done = cudasched("run", *options, "--", sys.executable, "-c", show)
    assert done.stderr == ""
    environment = json.loads(done.stdout)
    told = {"CLASS": "latency", "PRIORITY": "1", "SLO_MS": "20.0", "LEAD_US": "300.0", "NAME": "my program"}
    assert {name: environment[f"CUDASCHED_{name}"] for name in told} == told
    assert environment["CUDASCHED_DRIVER"] == str(simulated)


def test_arguments_exit_codes_and_signals_are_the_programs_own(cudasched: Run, simulated: Path) -> None:
    show = [sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(5)"]
    done = cudasched("run", *show, "--class", "x", "--", "a b", "")
    assert (done.returncode, done.stdout) == (5, "['--class', 'x', '--', 'a b', '']\n")
    done = cudasched("run", "--", *show, "--", "--help")
    assert (done.returncode, done.stdout) == (5, "['--', '--help']\n")
    done = cudasched("run", "--", "sh", "-c", "echo $0; kill -TERM $$")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "sh\n")


@pytest.mark.parametrize("by_service_manager", [False, True])
def test_a_program_starts_with_the_signals_that_python_ignores_for_itself(
    command: str, simulated: Path, by_service_manager: bool
) -> None:
    """Guards the end of `cudasched run yes | head`; a service manager ignores SIGPIPE for what it starts."""
    line = f'export SYSTEMD_EXEC_PID={"$$" if by_service_manager else ""}; exec "$0" "$@"'
    told = [command, "run", "--", "grep", "SigIgn", "/proc/self/status"]
    done = subprocess.run(["sh", "-c", line, *told], capture_output=True, text=True, timeout=PATIENCE_S)
    ignored = int(done.stdout.split()[1], 16)
    assert bool(ignored & 1 << signal.SIGPIPE - 1) is by_service_manager
    assert not ignored & 1 << signal.SIGXFSZ - 1


@pytest.mark.parametrize("own", [{}, {"LC_CTYPE": "C.UTF-8"}])
def test_a_programs_locale_stays_as_it_was(command: str, own: dict[str, str]) -> None:
    """Guards the environment of programs in containers, which have no locale: Python's own is not theirs."""
    told = [command, "run", "--", "/usr/bin/env"]
    done = subprocess.run(told, env=own, capture_output=True, text=True, timeout=PATIENCE_S)
    assert [line for line in done.stdout.splitlines() if line.startswith("LC_")] == [f"{k}={v}" for k, v in own.items()]


def test_one_run_within_another_is_one_shim(cudasched: Run, simulated: Path) -> None:
    command = shutil.which("cudasched", path=str(Path(sys.executable).parent)) or "cudasched"
    done = cudasched("run", "--", command, "run", "--", sys.executable, LAUNCHER, "2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "launched 2\n", "")


# ---- coverage ------------------------------------------------------------------------------------------------------

WRITE_REPORT = """
import json, os, sys
path = os.path.join(os.environ["CUDASCHED_COVERAGE_DIR"], f"coverage-{os.getpid()}.json")
hook, device = int(sys.argv[1]), int(sys.argv[2])
json.dump({"pid": os.getpid(), "name": "the [program]", "hook_launches": hook, "device_launches": device,
           "coverage": hook / device, "error": sys.argv[3]}, open(path, "w"))
sys.exit(int(sys.argv[4]))
"""


@pytest.mark.parametrize(
    ("report", "code", "said"),
    [
        (["100", "100", "", "0"], 0, "100.00 %"),
        (["99", "100", "", "0"], 1, "99.00 %"),
        (["99", "100", "", "4"], 4, "99.00 %"),
        (["5", "1", "no libcupti", "0"], 1, "not counted: no libcupti"),
    ],
)
def test_coverage_decides_the_exit_code(
    cudasched: Run, simulated: Path, report: list[str], code: int, said: str
) -> None:
    done = cudasched("run", "--check-coverage", "--", sys.executable, "-c", WRITE_REPORT, *report)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr and "the [program]" in done.stderr


def test_coverage_of_nothing_does_not_pass(cudasched: Run, simulated: Path) -> None:
    done = cudasched("run", "--check-coverage", "--", sys.executable, "-c", "print('done')")
    assert (done.returncode, done.stdout) == (1, "done\n")
    assert "nothing is known of its coverage" in one_line(done.stderr)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os._exit(0)", "launches on the device cannot be observed"),
        ("os.kill(os.getpid(), 9)", "did not come to an end"),
    ],
)
def test_a_forked_child_has_a_report_however_it_ends(cudasched: Run, simulated: Path, end: str, said: str) -> None:
    child = f"import os, launcher\nif os.fork() == 0: launcher.Gpu().launch(3); {end}\nos.wait()"
    done = cudasched("run", "--check-coverage", "--", sys.executable, "-c", child)
    assert done.returncode == 1
    assert said in done.stderr, done.stderr


def test_coverage_that_the_engine_cannot_count_fails(cudasched: Run, simulated: Path) -> None:
    """The simulated driver has no CUPTI: the engine's own report says so, and the check does not pass."""
    done = cudasched("run", "--check-coverage", "--", sys.executable, LAUNCHER, "3")
    assert (done.returncode, done.stdout) == (1, "launched 3\n")
    assert "not counted" in done.stderr and "launcher.py" in done.stderr


@pytest.mark.parametrize(
    "options", [["run", "--check-coverage"], ["collect", "-o", "x.parquet", "--timing", "events"], ["run"]]
)
def test_a_program_of_the_working_directory_is_found(cudasched: Run, simulated: Path, options: list[str]) -> None:
    """Guards "./": `Path` drops it, and `subprocess` looks for what is left on the PATH."""
    shutil.copy("/bin/echo", "here")
    assert cudasched(*options, "--", "./here", "started").stdout == "started\n"


def test_a_counted_program_killed_by_a_signal(cudasched: Run, simulated: Path) -> None:
    done = cudasched("run", "--check-coverage", "--", "sh", "-c", "kill -KILL $$")
    assert done.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_a_counted_program_once(command: str, simulated: Path, number: signal.Signals) -> None:
    code = (
        "import signal, sys, time\n"
        "got = []\n"
        f"signal.signal({int(number)}, lambda n, f: got.append(n))\n"
        "print('ready', flush=True)\n"
        "while not got: time.sleep(0.01)\n"
        "time.sleep(0.2); print(len(got), got[0]); sys.exit(6)"
    )
    arguments = [command, "run", "--check-coverage", "--", sys.executable, "-c", code]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (6, f"1 {int(number)}\n")


def test_a_counted_program_starts_with_its_signals_as_they_were(cudasched: Run, simulated: Path) -> None:
    show = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    done = cudasched("run", "--check-coverage", "--", sys.executable, "-c", show)
    assert done.stdout == "set()\n"


def test_a_torn_report_counts_as_an_error(tmp_path: Path) -> None:
    (tmp_path / "coverage-12.json").write_text('{"pid": 12, "na')
    whole = Report(7, "x", 10, 10, 1.0)
    (tmp_path / "coverage-7.json").write_text(json.dumps(whole.__dict__))
    reports = read_reports(tmp_path)
    assert [report.pid for report in reports] == [7, 12]
    assert reports[0] == whole and reports[1].error
    assert (verdict(0, reports[:1]), verdict(0, reports), verdict(3, reports), verdict(0, [])) == (0, 1, 3, 1)


def test_cupti_is_the_programs_own_before_the_toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit = tmp_path / "cuda" / "extras" / "CUPTI" / "lib64"
    packages = tmp_path / "venv" / "lib" / "python3.12" / "site-packages" / "nvidia" / "cu13" / "lib"
    for directory in (toolkit, packages, tmp_path / "venv" / "bin"):
        directory.mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python3"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nowhere"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    (toolkit / "libcupti.so.13").touch()
    assert find_cupti(Path("/bin/true")) == str(toolkit / "libcupti.so.13")
    (packages / "libcupti.so.13").touch()
    assert find_cupti(python) == str(packages / "libcupti.so.13")
    script = tmp_path / "tool"
    script.write_bytes(b"#!" + os.fsencode(python) + b"\n")
    assert find_cupti(script) == str(packages / "libcupti.so.13")


# ---- the demo ------------------------------------------------------------------------------------------------------


def test_the_demo_gets_its_options(python: Run) -> None:
    code = """
import sys, types
from pathlib import Path
fake = types.ModuleType("cudasched.demo")
fake.main = lambda seconds, output, simulate, as_json: print(seconds, output, simulate, as_json) or 4
import cudasched
sys.modules["cudasched.demo"] = cudasched.demo = fake
from cudasched.cli import main
sys.argv = ["cudasched", "demo", "--seconds", "3", "--output", "there", "--simulate"]
main()
"""
    done = python(code)
    assert (done.returncode, done.stdout) == (4, "3.0 there True False\n"), done.stderr
