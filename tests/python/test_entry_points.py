"""The table of the driver's entry points: what is said of a malformed one; that it has what CUDA's headers have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

HOOK = ROOT / "csrc" / "hook"

GOOD = "# Why.\ncuInit 2000 - direct - - - hook\n"


def generate(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    table = tmp_path / "entry_points.txt"
    table.write_text(text)
    command = [sys.executable, HOOK / "trampolines.py", table, tmp_path / "out"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def check(headers: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, HOOK / "entry_points.py", "check", headers]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_table_becomes_symbols_with_their_twins(tmp_path: Path) -> None:
    done = generate(tmp_path, GOOD + "\n# Why.\ncuMemcpy2DAsync_v2 3020 ptsz drain stream stream=1 - -\n")
    assert (done.returncode, done.stderr) == (0, "")
    exports = (tmp_path / "out" / "exports.map").read_text()
    for symbol in ("cuInit", "cuMemcpy2DAsync_v2", "cuMemcpy2DAsync_v2_ptsz"):
        assert f"    {symbol};\n" in exports
    assert "cuInit_ptsz" not in exports


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cuInit 2000 - direct - - - hook", ":3: cuInit is on line 2 already"),
        ("cuInit", ":3: 1 columns; there are 8"),
        ("cudbgInit 2000 - direct - - - -", "'cudbgInit' is no driver function's name"),
        ("cuX_ptsz 7000 - direct - - - -", "'cuX_ptsz' is no driver function's name"),
        ("cuX; 2000 - direct - - - -", "'cuX;' is no driver function's name"),
        ("cuX new - direct - - - -", "since 'new'"),
        ("cuX 2000,cuY - direct - - - -", "since '2000,cuY'"),
        ("cuX 2000 ptxx direct - - - -", "'ptxx' is no twin"),
        ("cuX 2000 - wait stream stream=0 - -", "'wait' is no treatment"),
        ("cuX 2000 - drain thread - - -", "'thread' is no scope"),
        ("cuX 2000 - drain stream stream=x - -", "argument 'stream=x'"),
        ("cuX 2000 - drain stream stream=16 - -", "argument 'stream=16'"),
        ("cuX 2000 - drain stream stream=0,stream=1 - -", "argument 'stream=1'"),
        ("cuX 2000 - drain process - forget -", "'forget' is no meaning"),
        ("cuX 2000 - drain process - - us", "'us' is no by"),
        ("cuX 2000 - drain - - - -", "cuX: a direct function has no scope"),
        ("cuX 2000 - direct stream stream=0 - -", "cuX: a direct function has no scope"),
        ("cuX 2000 - defer stream stream=0 - -", "cuX: defer needs a function in csrc/hook"),
        ("cuX 2000 - gate process - free hook", "cuX: only a launch waits at the gate"),
        ("cuX 2000 - direct - event=0 - -", "cuX: nothing reads a direct function's arguments"),
        ("cuX 2000 - direct - - allocate -", "cuX: allocate needs a function in csrc/hook"),
        ("cuX 2000 - direct - - begin-capture hook", "cuX: queued launches would be captured"),
        ("cuX 2000 - direct - - free -", "cuX: free drains for memory or process"),
        ("cuX 2000 - drain stream stream=0 destroy-context -", "cuX: destroy-context drains for memory or process"),
        ("cuX 2000 - drain stream - - -", "cuX: which argument is the stream?"),
        ("cuX 2000 - drain process - share-event -", "cuX: which argument is the event?"),
        ("cuInit_v2 2000 - direct - - - -", "cuInit means cuInit and cuInit_v2 from 2000 on"),
    ],
)
def test_a_malformed_table_ends_the_build(tmp_path: Path, line: str, message: str) -> None:
    done = generate(tmp_path, f"{GOOD}{line}\n")
    assert done.returncode == 1
    assert "trampolines.py: error: " in done.stderr
    assert "entry_points.txt:" in done.stderr
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no entry points"),
        ("# nothing\n", "no entry points"),
        ("cuInit 2000 - direct - - - hook\n", ":1: put a comment above it"),
        (GOOD + "\ncuX 2000 - direct - - - -\n", ":4: put a comment above it"),
    ],
)
def test_a_table_has_lines_and_reasons(tmp_path: Path, text: str, message: str) -> None:
    done = generate(tmp_path, text)
    assert done.returncode == 1
    assert message in done.stderr


# ---- against headers


def build_headers() -> Path:
    """The headers that the build has."""
    cache = ROOT / "build" / "cpp" / "CMakeCache.txt"
    found = [Path(entry) / "nvidia" / "cu13" / "include" for entry in sys.path if entry]
    found += [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if cache.exists():
        prefix = "CUDASCHED_CUDA_INCLUDE:PATH="
        found += [Path(line.removeprefix(prefix)) for line in cache.read_text().split("\n") if line.startswith(prefix)]
    found.append(Path("/usr/local/cuda/include"))
    for directory in found:
        if (directory / "cudaTypedefs.h").is_file():
            return directory
    pytest.skip("no cudaTypedefs.h here (the nvidia-cuda-runtime wheel, CUDA_HOME or /usr/local/cuda has it)")


def test_the_table_has_what_the_builds_headers_have() -> None:
    done = check(build_headers())
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_what_the_table_lacks_is_told_as_lines_to_add(tmp_path: Path) -> None:
    (tmp_path / "cuda.h").write_text(
        "/* CUresult CUDAAPI cuInAComment(void); */\n"
        "CUresult CUDAAPI cuInit(unsigned int Flags);\n"
        "CUresult CUDAAPI cuWithoutTypedef(int a,\n    int b);\n"
    )
    (tmp_path / "cudaTypedefs.h").write_text(
        "typedef CUresult (CUDAAPI *PFN_cuInit_v2000)(unsigned int Flags);\n"
        "typedef CUresult (CUDAAPI *PFN_cuMemFree_v14000)(CUdeviceptr dptr, int how);\n"
        "typedef CUresult (CUDAAPI *PFN_cuNewAsync_v14000)(int a, CUstream hStream);\n"
        "typedef CUresult (CUDAAPI *PFN_cuNewAsync_v14000_ptsz)(int a, CUstream hStream);\n"
    )
    done = check(tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "cuMemFree_v3 14000 - drain process - - -",
        "cuNewAsync 14000 ptsz drain stream stream=1 - -",
        "cuWithoutTypedef - - drain process - - -",
    ]
    assert "lacks these lines" in done.stderr
    # What it prints is what the table takes.
    grown = (HOOK / "entry_points.txt").read_text() + "\n# New.\n" + done.stdout
    assert generate(tmp_path, grown).stderr == ""


def test_an_argument_that_is_elsewhere_is_told(tmp_path: Path) -> None:
    (tmp_path / "cuda.h").touch()
    (tmp_path / "cudaTypedefs.h").write_text(
        "typedef CUresult (CUDAAPI *PFN_cuEventQuery_v2000)(int a, CUevent hEvent);\n"
        "typedef CUresult (CUDAAPI *PFN_cuStreamDestroy_v4000)(const CUstream hStream);\n"
        "typedef CUresult (CUDAAPI *PFN_cuMemcpyDtoH_v3020)(void *dstHost);\n"
    )
    done = check(tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "cuEventQuery event=0: that is int",
        "cuMemcpyDtoH_v2 memory=1: that is nothing",
    ]
    assert "where the headers have others" in done.stderr


def test_a_directory_without_headers_is_told(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path} has no cuda.h" in done.stderr
