"""A source distribution has all that a build needs."""

from __future__ import annotations

import pathlib
import re
import sys
import tarfile
import zipfile

import pytest
from conftest import ROOT, run

BUILD_SDIST = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"


@pytest.fixture(scope="module")
def sdist(source: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("sdist")
    run([sys.executable, "-c", BUILD_SDIST, directory], cwd=source)
    (built,) = directory.glob("*.tar.gz")
    return built


def test_holds_the_sources_and_no_build_output(sdist: pathlib.Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "CMakeLists.txt",
        "csrc/hook/entry_points.txt",
        "csrc/kernels/layernorm.cu",
        "csrc/kernels/layernorm.toml",
        "include/cudasched/engine.h",
        "LICENSE",
        "README.md",
        "docs/package.md",
    } <= names
    assert not any(name.startswith(("build/", ".venv")) or name.endswith((".so", ".o", ".a")) for name in names)


def test_leaves_out_pictures_and_what_models_were_trained_on(sdist: pathlib.Path) -> None:
    """The data are larger than all the rest together, and no build needs the two."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert "training/train.py" in names
    assert not any(
        name.startswith(("training/data/", "docs/images/")) or name.endswith((".parquet", ".npz", ".ipynb"))
        for name in names
    )
    assert sdist.stat().st_size < 4 << 20


def test_an_index_takes_it_and_the_wheel(sdist: pathlib.Path, wheel: pathlib.Path) -> None:
    run([sys.executable, "-m", "twine", "check", "--strict", sdist, wheel])


def test_page_of_an_index_links_no_file_of_the_tree() -> None:
    targets = re.findall(r"""\]\(([^)]*)|(?:src|href)=["']([^"']*)""", (ROOT / "docs/package.md").read_text())
    assert [target for pair in targets for target in pair if target and not target.startswith("https://")] == []


def test_wheel_built_from_it_is_the_wheel_of_the_tree(
    sdist: pathlib.Path, wheel: pathlib.Path, build_environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, sdist], env=build_environment)
    (built,) = tmp_path.glob("*.whl")
    assert built.name == wheel.name
    with zipfile.ZipFile(built) as from_sdist, zipfile.ZipFile(wheel) as from_tree:
        assert sorted(from_sdist.namelist()) == sorted(from_tree.namelist())
