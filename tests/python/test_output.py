"""Where outputs go: regular files are replaced whole, devices and pipes written to, everything else refused."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cudasched._output import Output
from cudasched.errors import ConfigError
from support import PATIENCE_S, ROOT, Run


def test_a_new_file_has_the_mode_that_new_files_have(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        Output(tmp_path / "new.txt").write("x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.txt").stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["new.txt"]


def test_a_file_is_replaced_with_its_mode_kept(tmp_path: Path) -> None:
    path = tmp_path / "old.txt"
    path.write_text("before")
    path.chmod(0o604)
    opened = path.open()
    Output(path).write(b"after")
    assert (path.read_text(), opened.read()) == (
        "after",
        "before",
    )  # who had it open keeps the old one: no half is seen
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.txt"
    link.symlink_to("there/target.txt")
    Output(link).write("first")  # which makes what the link leads to
    Output(link).write("second")
    assert link.is_symlink() and (tmp_path / "there" / "target.txt").read_text() == "second"


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "old.txt"
    path.write_text("before")
    with pytest.raises(RuntimeError), Output(path).replacing() as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "before"
    assert not list(tmp_path.glob(".old*"))


def _device(name: str, minor: int, tmp_path: Path) -> Path:
    """A device that cannot be replaced by accident: root's is a node of the test's own."""
    if os.geteuid() != 0:
        return Path("/dev") / name
    node = tmp_path / name
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        node.open("rb").close()
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    return node


def test_a_file_of_another_format_is_refused_and_a_stream_is_none(tmp_path: Path, null: Path) -> None:
    assert Output(tmp_path / "a.PNG", formats=(".png", ".svg")).path and Output(null, formats=(".png",)).is_stream
    with pytest.raises(ConfigError, match=r"-o .*a\.txt: name a file that ends in \.png or \.svg"):
        Output(tmp_path / "a.txt", option="-o", formats=(".png", ".svg"))


@pytest.fixture
def null(tmp_path: Path) -> Path:
    return _device("null", 3, tmp_path)


@pytest.fixture
def full(tmp_path: Path) -> Path:
    return _device("full", 7, tmp_path)


def test_devices_are_written_to_and_stay(null: Path, full: Path) -> None:
    output = Output(null)
    assert output.is_stream and not output.holds_something
    output.write("x")
    with pytest.raises(Exception, match=r"full: it cannot be written: No space left"):
        Output(full).write("x")
    assert all(stat.S_ISCHR(os.stat(device).st_mode) for device in (null, full))


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.append(fifo.read_text()))
    reader.start()
    Output(fifo).write("through")
    reader.join(PATIENCE_S)
    assert said == ["through"] and stat.S_ISFIFO(fifo.stat().st_mode)


def test_standard_output_is_written_to_behind_what_is_in_it(tmp_path: Path) -> None:
    code = (
        "import sys; from cudasched._output import Output\n"
        "print('first', flush=True)\n"
        "for path in sys.argv[1:]: Output(path).write(path + '\\n')\n"
        "print('last', flush=True)\n"
    )
    paths = ["/dev/stdout", "/proc/self/fd/1", "/dev/fd/1"]
    with (tmp_path / "file").open("w") as file:
        subprocess.run([sys.executable, "-c", code, *paths], stdout=file, check=True, timeout=PATIENCE_S)
    assert (tmp_path / "file").read_text().split() == ["first", *paths, "last"]
    piped = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=PATIENCE_S)
    assert piped.stdout.split() == ["first", *paths, "last"]


def test_everything_else_is_refused_by_name(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        (tmp_path / "loop").symlink_to("loop")
        for path, why in (
            (tmp_path, "it is a directory"),
            ("socket", "it is a socket"),
            ("nowhere/x.json", "there is no directory"),
            ("loop", "symbolic links"),
            ("x" * 300, "too long"),
            ("a\0b", "null"),
        ):
            with pytest.raises(ConfigError, match=why) as raised:
                Output(path, option="-o")
            assert str(raised.value).startswith("-o ") and str(raised.value).count("-o ") == 1


def test_a_file_that_one_may_not_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    (tmp_path / "kept").chmod(0o444)
    (tmp_path / "closed").mkdir(mode=0o555)
    code = (
        "import os, sys\nif os.geteuid() == 0: os.setresuid(54321, 54321, 54321)\n"
        "from cudasched._output import Output\n"
        "for path in sys.argv[1:]:\n"
        "    try: Output(path)\n"
        "    except ValueError as error: print(error)\n"
    )
    for directory in tmp_path.parents:
        if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o055)
    tmp_path.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "kept"), str(tmp_path / "closed" / "x")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd="/",
    )
    if "ModuleNotFound" in done.stderr or "PermissionError" in done.stderr:
        pytest.skip("the package is where another user cannot read it")
    first, second = done.stdout.splitlines()
    assert "you may not write to it" in first and "no file can be made in" in second


@pytest.mark.parametrize(
    "arguments",
    [
        ["collect", "-o", "{}", "--timing", "events", "--", "touch", "ran"],
        ["advise", "-o", "{}", "--", "touch", "ran"],
        ["demo", "--simulate", "--seconds", "1", "--output", "{}"],
    ],
)
def test_outputs_are_looked_at_before_the_work_begins(
    cudasched: Run, simulated: Path, tmp_path: Path, arguments: list[str]
) -> None:
    done = cudasched(*(argument.format(tmp_path) for argument in arguments))
    assert done.returncode == 2 and "it is a directory" in done.stderr and len(done.stderr.splitlines()) == 1
    assert done.stdout == "" and not (tmp_path / "ran").exists()


def test_recording_into_a_device_leaves_it_one(cudasched: Run, simulated: Path, null: Path, full: Path) -> None:
    launcher = str(ROOT / "tests/python/launcher.py")
    for device, code in ((null, 0), (full, 1)):
        done = cudasched("collect", "-o", str(device), "--timing", "events", "--", sys.executable, launcher, "5")
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        assert stat.S_ISCHR(os.stat(device).st_mode) and not Path(f"{device}.journals").exists()


def test_a_report_goes_to_standard_output_and_a_plot_into_a_device(
    cudasched: Run, simulated: Path, tmp_path: Path, null: Path
) -> None:
    launcher = str(ROOT / "tests/python/launcher.py")
    done = cudasched("collect", "-o", "data.parquet", "--timing", "events", "--", sys.executable, launcher, "50")
    assert done.returncode == 0, done.stderr
    done = cudasched("advise", "--data", "data.parquet", "-o", "/dev/stdout")
    assert done.returncode == 0 and '"schema_version": 3' in done.stdout, done.stderr
    done = cudasched("simulate", "data.parquet", "--seconds", "1", "--output", str(null))
    assert done.returncode == 0 and stat.S_ISCHR(os.stat(null).st_mode), done.stderr
