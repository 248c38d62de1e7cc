"""Without CUDA's headers, or with old ones, a build stops and says how to get them."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT, run


def configure(build: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["cmake", "-S", ROOT, "-B", build, f"-DPython_EXECUTABLE={sys.executable}", "-DCUDASCHED_PYTHON=OFF", *options],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_missing_headers_say_how_to_get_them(tmp_path: pathlib.Path) -> None:
    """The search is sent to an empty root, so that it finds neither wheels nor a toolkit."""
    done = configure(
        tmp_path / "build", f"-DCMAKE_FIND_ROOT_PATH={tmp_path}", "-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY"
    )
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "cuda.h" in said
    assert "cupti.h" in said
    for wheel in ("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cupti"):
        assert f"'{wheel}==13.0.*'" in said
    assert "CUDA_HOME" in said


def test_old_headers_are_named_with_their_version(tmp_path: pathlib.Path) -> None:
    (tmp_path / "cuda.h").write_text("#define CUDA_VERSION 12040\n")
    (tmp_path / "cupti.h").touch()
    done = configure(
        tmp_path / "build", f"-DCUDASCHED_CUDA_INCLUDE={tmp_path}", f"-DCUDASCHED_CUPTI_INCLUDE={tmp_path}"
    )
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "12040" in said
    assert str(tmp_path / "cuda.h") in "".join(done.stderr.split())
    assert "pip install 'nvidia-cuda-runtime==13.0.*'" in said


@pytest.mark.parametrize(
    ("wheel", "newest_cuda"), [("nvidia-cuda-runtime", True), ("nvidia-cuda-runtime-cu12==12.2.*", False)]
)
def test_the_table_of_entry_points_has_what_the_newest_and_the_oldest_headers_have(
    wheel: str, newest_cuda: bool, tmp_path: pathlib.Path
) -> None:
    """From driver 535 to the newest CUDA there is. A failure prints the lines to add to csrc/hook/entry_points.txt."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    run([*pip, "-d", tmp_path, wheel])
    (file,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        headers = [name for name in archive.namelist() if re.search(r"/include/cuda\w*\.h$", name)]
        archive.extractall(tmp_path, headers)
    directory = tmp_path / pathlib.Path(headers[0]).parent
    version = re.search(r"^#define CUDA_VERSION (\d+)", (directory / "cuda.h").read_text(), re.M)
    assert version is not None
    assert (int(version[1]) >= 13000) == newest_cuda
    run([sys.executable, ROOT / "csrc/hook/entry_points.py", "check", directory])
