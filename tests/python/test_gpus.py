"""What is asked of NVML, and how often, through a stand-in for nvidia-ml-py."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cudasched.observe import _gpus
from cudasched.observe._metrics import Device

#: Of an idle H200, by its driver 580: version 1 counts what the driver keeps for itself as used.
RESERVED, TOTAL = 644_939_776, 150_754_820_096


class Nvml:
    """Two versions of the answer on memory, as the real one has."""

    nvmlMemory_v2 = 0x2000028  # noqa: N815
    NVML_CLOCK_SM = 1

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.knows_version_2 = True
        self.works = True

    def __getattr__(self, name: str) -> Any:
        if name == "nvmlDeviceGetComputeRunningProcesses":
            return lambda handle: []
        raise AttributeError(name)

    def nvmlInit(self) -> None:  # noqa: N802
        self.calls["init"] += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.calls["shutdown"] += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if not self.works:
            raise RuntimeError("Uninitialized")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> SimpleNamespace:  # noqa: N802
        if version is not None and not self.knows_version_2:
            raise RuntimeError("Function Not Found")
        used = 1 << 30
        return SimpleNamespace(used=used if version else used + RESERVED, total=TOTAL)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvml]:
    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(_gpus, "_begun_by", None)
    yield fake


DEVICE = Device("GPU-1", "NVIDIA H200", "", Path("/nowhere"))


def test_what_the_driver_keeps_for_itself_is_not_in_use(nvml: Nvml) -> None:
    assert _gpus.gpus([DEVICE], [])["GPU-1"].memory_used_bytes == 1 << 30
    nvml.knows_version_2 = False  # drivers before 510
    assert _gpus.gpus([DEVICE], [])["GPU-1"].memory_used_bytes == (1 << 30) + RESERVED
    assert _gpus.gpus([DEVICE], [])["GPU-1"].memory_total_bytes == TOTAL


def test_a_client_is_looked_at_once_and_a_later_process_of_its_pid_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of mappings take milliseconds, and a scrape of 64 clients has tens."""
    table = tmp_path / "GPU-1.arbiter"
    table.touch()
    monkeypatch.setattr(_gpus, "_PROC", tmp_path)
    monkeypatch.setattr(_gpus, "_clients", set())
    place = tmp_path / "7"
    place.mkdir()

    def process(started: int, maps: str) -> None:
        (place / "stat").write_text(f"7 (a) b (c)) S {' '.join(['0'] * 18)} {started} 0 0\n")
        (place / "maps").write_text(maps)

    mapped = f"7f00-7f01 rw-s 00000000 00:1a {table.stat().st_ino} {table}\n"
    process(100, "")
    assert _gpus._is_client(7, table) is False
    process(100, "7f00-7f01 r-xp 00000000 00:1a 9 /lib/libcudasched.so\n")
    assert _gpus._is_client(7, table) is True, "it has made no launch yet"
    process(100, mapped.replace(str(table.stat().st_ino), "1"))
    assert _gpus._is_client(7, table) is None, "and then in another table"
    process(100, mapped)
    assert _gpus._is_client(7, table) is True, "what is not one may become one"
    (place / "maps").unlink()
    assert _gpus._is_client(7, table) is True
    process(200, mapped.replace(str(table.stat().st_ino), "1"))
    assert _gpus._is_client(7, table) is None, "another table of the same GPU"
    (place / "stat").unlink()
    assert _gpus._is_client(7, table) is False


def test_nvml_is_begun_once(nvml: Nvml) -> None:
    assert _gpus.gpus([], []) == {} and not nvml.calls, "no GPU, nothing to ask"
    for _ in range(3):
        assert set(_gpus.gpus([DEVICE], [])) == {"GPU-1"}
    assert nvml.calls == {"init": 1}, "it takes tens of milliseconds"


def test_nvml_is_begun_anew_once_it_no_longer_answers(nvml: Nvml) -> None:
    _gpus.gpus([DEVICE], [])
    nvml.works = False  # the driver was loaded anew
    assert _gpus.gpus([DEVICE], []) == {}
    nvml.works = True
    assert set(_gpus.gpus([DEVICE], [])) == {"GPU-1"}
    assert nvml.calls == {"init": 2, "shutdown": 1}


def test_nvml_is_begun_anew_in_a_child(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus.gpus([DEVICE], [])
    monkeypatch.setattr(_gpus.os, "getpid", lambda: 4711)
    _gpus.gpus([DEVICE], [])
    assert nvml.calls["init"] == 2
