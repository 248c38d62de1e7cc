"""Without CUDA's headers, or with old ones, a build stops and says how to get them."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from conftest import ROOT


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
