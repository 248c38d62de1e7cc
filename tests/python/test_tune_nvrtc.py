"""NVRTC: where it is looked for, and what is said where there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cudasched.errors import Error
from cudasched.tune import _nvrtc


def test_it_is_looked_for_in_wheels_then_in_a_toolkit_the_major_of_pytorch_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("wheels/cu13/lib/libnvrtc.so.13", "wheels/cuda_nvrtc/lib/libnvrtc.so.12", "cuda/lib64/libnvrtc.so.13"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "wheels")])
    monkeypatch.setattr(_nvrtc.importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv("CUDA_PATH", raising=False)

    def found() -> list[str]:
        return [one.removeprefix(f"{tmp_path}/") for one in _nvrtc._candidates() if "/usr/local" not in one]

    thirteen = ["wheels/cu13/lib/libnvrtc.so.13", "cuda/lib64/libnvrtc.so.13", "libnvrtc.so.13"]
    twelve = ["wheels/cuda_nvrtc/lib/libnvrtc.so.12", "libnvrtc.so.12"]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda="12.8")))
    assert found() == twelve + thirteen
    for version in ("13.0", None, "odd"):  # of a CUDA build, of one for the host, of one's own
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=version)))
        assert found() == thirteen + twelve


def test_what_is_no_nvrtc_is_passed_over_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(_nvrtc, "_candidates", lambda: iter([str(broken), "libc.so.6"]))
    _nvrtc.load.cache_clear()
    with pytest.raises(Error, match=r"no NVRTC \(.*libnvrtc.so.13.*; no NVRTC: .*nvrtcVersion"):
        _nvrtc.load()
    _nvrtc.load.cache_clear()
