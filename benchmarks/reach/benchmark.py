"""Where cudasched installs, and how much there is to read: benchmarks/results/reach.json.

`wheel` wants `make wheel` and `make wheel-arm64` before; `arm64`, `image` and `roots` say what they want. CI's own time
is given: `--ci-seconds`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time

from cudasched.demo.harness import HarnessError

from benchmarks.lab.processes import ROOT, output_of
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Session, median_of, once

HOUR_S = 3600
IMPORTS = 30


def imported(session: Session) -> Found:
    """What `import cudasched` adds to starting Python, in processes that take turns; there is no driver."""

    def started(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return (time.perf_counter() - began) * 1e3

    started("import cudasched")
    times = [started("import cudasched") - started("pass") for _ in range(IMPORTS)]
    return {"import_ms": median_of(times)}


def said(command: list[str]) -> tuple[str, float]:
    """What a command prints, and how long it takes, s. Raises HarnessError where it fails."""
    began = time.monotonic()
    text = output_of(" ".join(command), command, timeout_s=HOUR_S, ended=(0, 8))  # ctest's where tests failed
    return text, time.monotonic() - began


def words(session: Session) -> Found:
    """Of README.md and docs/*.md, as the lint counts them."""
    figures = json.loads(said([sys.executable, "scripts/words.py", "--figures"])[0])
    del figures["sentences_over_25"]
    return {name: once(value) for name, value in figures.items()}


def wheels(session: Session) -> Found:
    """Those in dist/: sizes, and the C library that their tags promise, as auditwheel found it."""
    found: Found = {}
    for figure, processor in {"wheel_MB": "x86_64", "wheel_arm64_MB": "aarch64"}.items():
        for wheel in (ROOT / "dist").glob(f"*manylinux_2_*_{processor}.whl"):
            minor = re.search(r"manylinux_2_(\d+)", wheel.name)
            assert minor is not None
            found |= {figure: once(wheel.stat().st_size / 1e6), "wheel_glibc_minor": once(float(minor[1]))}
    if not found:
        raise HarnessError("dist/ has no wheel: make wheel")
    return found


def installed_again(session: Session) -> Found:
    """An install of the source tree where one was made before."""
    with tempfile.TemporaryDirectory(prefix="cudasched-install-") as directory:
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--upgrade"]
        times = [said([*install, "--target", directory, "."])[1] for _ in range(2)]
    return {"install_again_s": once(times[1])}


def arm64(session: Session) -> Found:
    """The C++ tests that qemu can run; the build is not counted."""
    text, _ = said(["scripts/arm64.sh"])
    failed = re.search(r"(\d+) tests failed out of|100% tests passed()", text)  # CMake 4 counts no failures then
    took = re.search(r"Total Test time \(real\) = +([\d.]+)", text)
    if failed is None or took is None:
        raise HarnessError(f"scripts/arm64.sh: no count of tests in {text[-500:]!r}")
    return {"arm64_tests_failed": once(float(failed[1] or 0)), "arm64_suite_s": once(float(took[1]))}


def image(session: Session) -> Found:
    """The demo's image without its base, and whether the demo runs in a container of it."""
    text, _ = said(["scripts/image.sh", "demo"])
    sizes = [float(size) for size in re.findall(r"^\S+:\S+ +([\d.]+) MB$", text, re.MULTILINE)]
    if len(sizes) != 2:
        raise HarnessError(f"scripts/image.sh: no sizes of image and base in {text[-500:]!r}")
    own, base = sorted(sizes, reverse=True)
    return {"image_MB": once(own - base), "image_demo_ok": once(1.0)}


def roots(session: Session) -> Found:
    """New roots of distributions in which a wheel does not install, or the demo does not run."""
    text, _ = said(["scripts/roots.sh"])
    failed = re.search(r"^(\d+) roots failed of", text, re.MULTILINE)
    if failed is None:
        raise HarnessError(f"scripts/roots.sh: no count of roots in {text[-500:]!r}")
    return {"roots_failed": once(float(failed[1]))}


def ci(session: Session) -> Found:
    """As CI says it."""
    seconds = session.options.ci_seconds
    return {"ci_s": once(float(seconds))} if seconds else {}


BENCHMARK = Benchmark(
    about="where cudasched installs, and how much there is to read",
    groups={
        "words": words,
        "wheel": wheels,
        "import": imported,
        "install": installed_again,
        "arm64": arm64,
        "image": image,
        "roots": roots,
        "ci": ci,
    },
    goals={
        "wheel_MB": (5.0, "less"),
        "wheel_glibc_minor": (34.0, "less"),
        "wheel_arm64_MB": (5.0, "less"),
        "arm64_tests_failed": (0.0, "less"),
        "arm64_suite_s": (900.0, "less"),
        "import_ms": (50.0, "less"),
        "image_MB": (150.0, "less"),
        "image_demo_ok": (1.0, "more"),
        "roots_failed": (0.0, "less"),
        "free_what_per_100": (0.15, "less"),
        "pronouns_per_100": (3.0, "less"),
        "words_per_sentence": (20.0, "less"),
        "docs_words": (40_000.0, "less"),
        "install_again_s": (30.0, "less"),
        "ci_s": (1200.0, "less"),
    },
    settings={"ci_seconds": int},
    gpu=False,
)
