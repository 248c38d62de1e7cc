"""What a wheel has in it, and what its libraries ask of a machine."""

from __future__ import annotations

import os
import pathlib
import re
import stat
import subprocess
import sys
import sysconfig
import zipfile

import pytest
from conftest import ROOT, run

LIBRARIES = {
    "cudasched/libcudasched.so": "libcudasched.so",
    "cudasched/hook/libcuda.so.1": "libcuda.so.1",
    "cudasched/hook/libcuda.so": "libcuda.so",
    "cudasched/simulate/libcuda.so.1": "libcuda.so.1",
}
CORE = f"cudasched/_core{sysconfig.get_config_var('EXT_SUFFIX')}"

# What every glibc system has. libgcc_s too: it belongs to the system's C library where exceptions and thread exit are.
SYSTEM = {
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "libgcc_s.so.1",
    "ld-linux-x86-64.so.2",
}
NEEDED = {
    "cudasched/libcudasched.so": SYSTEM,
    "cudasched/hook/libcuda.so.1": {"libc.so.6", "libdl.so.2"},
    "cudasched/hook/libcuda.so": {"libcuda.so.1"},
    "cudasched/simulate/libcuda.so.1": SYSTEM,
    CORE: SYSTEM | {"libcudasched.so"},
}

OLD_GLIBC = pytest.mark.skipif(
    int((os.confstr("CS_GNU_LIBC_VERSION") or "glibc 2.0").split(".")[1]) > 37,
    reason="headers of glibc 2.38 and later ask for its functions; wheels for others are built on Debian 12",
)


@pytest.fixture(scope="module")
def unpacked(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def dynamic(library: pathlib.Path, tag: str) -> list[str]:
    """The values of one tag of the library's dynamic section."""
    return re.findall(rf"\({tag}\).*\[(.*)\]", run(["readelf", "-dW", library]))


def exported(library: pathlib.Path) -> set[str]:
    """The symbols that others can link or look up."""
    lines = run(["nm", "-D", "--defined-only", library]).splitlines()
    return {line.split()[2].partition("@")[0] for line in lines if len(line.split()) == 3 and line.split()[1] != "A"}


def test_holds_each_library_once_as_a_regular_file(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    shared = sorted(entry.filename for entry in entries if re.search(r"\.so(\.|$)", entry.filename))
    assert shared == sorted([*LIBRARIES, CORE])
    links = [entry.filename for entry in entries if stat.S_ISLNK(entry.external_attr >> 16)]
    assert links == []


def test_holds_the_python_sources_types_data_and_licence(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = ROOT / "python"
    sources = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    assert sources <= names
    assert {"cudasched/py.typed", "cudasched/_core.pyi"} <= names
    assert {"cudasched/advise/origins.toml", "cudasched/advise/report.html.j2"} <= names
    assert {"cudasched/observe/baseline/report.html.j2", "pytest_cudasched/__init__.py"} <= names
    models = {str(path.relative_to(package)) for path in package.glob("cudasched/predictor/models/*.ubj")}
    assert models and models <= names
    assert any(re.fullmatch(r"cudasched-[^/]*\.dist-info/licenses/LICENSE", name) for name in names)


def test_holds_the_headers_and_the_cmake_package(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    headers = {str(path.relative_to(ROOT)) for path in (ROOT / "include").rglob("*.[hi]*")}
    assert {f"cudasched/{header}" for header in headers} <= names
    assert {f"cudasched/cmake/cudaschedConfig{part}.cmake" for part in ("", "Version")} <= names


def test_holds_the_kernels_with_their_spaces_and_best_configurations(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    kernels = {path.name for path in (ROOT / "csrc" / "kernels").iterdir() if path.is_file()}
    assert {"layernorm.cu", "layernorm.toml", "row.cuh", "references.py", "best.json"} <= kernels
    assert {f"cudasched/kernels/sources/{name}" for name in kernels} <= names


def test_holds_nothing_else(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    allowed = re.compile(
        r"cudasched/.*\.(py|pyi|typed|so|so\.1)|cudasched/libcudasched_graphs\.a|cudasched/advise/(origins\.toml|report\.html\.j2)"
        r"|cudasched/predictor/models/sm_\d+\.(ubj|json|md)|cudasched-[^/]*\.dist-info/.*"
        r"|cudasched/torch/sources/(base|torch)/\w+\.[ch]pp|cudasched/tune/compare\.cu"
        r"|cudasched/kernels/sources/\w+\.(cuh?|toml|json)"
        r"|cudasched/observe/(alerts\.yaml|dashboard\.json|trace/flame\.html)"
        r"|cudasched/inference/kserve\.(binpb|proto)|cudasched/serve/(assets/(icon\.svg|page\.(css|html|js))|control\.(binpb|proto))"
        r"|cudasched/observe/(analyze|baseline)/report\.html\.j2|pytest_cudasched/(__init__\.py|py\.typed)"
        r"|cudasched/include/cudasched/(counts\.(h|inc)|engine\.h|(graphs|scheduler)\.hpp|device/\w+\.cuh)|cudasched/cmake/cudaschedConfig(Version|-\w+)?\.cmake"
    )
    assert [name for name in names if not allowed.fullmatch(name)] == []
    assert [name for name in names if re.search(r"(^|/)(tests?|benchmarks|csrc)/", name)] == []


def test_is_small(wheel: pathlib.Path) -> None:
    assert wheel.stat().st_size <= 4e6


@pytest.mark.parametrize("library", sorted(NEEDED))
def test_leaves_debug_information_to_files_of_its_own(
    wheel: pathlib.Path, unpacked: pathlib.Path, library: str
) -> None:
    """The file in `debug` is where gdb looks for it: under the build id of the library in the wheel."""
    assert re.findall(r" (\.symtab|\.debug_\w+) ", run(["readelf", "-SW", unpacked / library])) == []
    (build_id,) = re.findall(r"Build ID: ([0-9a-f]{40})", run(["readelf", "-nW", unpacked / library]))
    sections = run(["readelf", "-SW", wheel.parent / "debug/.build-id" / build_id[:2] / f"{build_id[2:]}.debug"])
    assert " .symtab " in sections
    if library != "cudasched/hook/libcuda.so":  # it has no code
        assert {".debug_info", ".debug_line"} <= set(re.findall(r" (\.debug_\w+) ", sections))


@pytest.mark.parametrize("library", sorted(NEEDED))
def test_needs_nothing_that_a_machine_may_lack(unpacked: pathlib.Path, library: str) -> None:
    """No libcuda, libcudart, libcupti or libstdc++, which may be absent or another version; the stub needs the shim."""
    needed = set(dynamic(unpacked / library, "NEEDED"))
    assert needed <= NEEDED[library]
    if library == "cudasched/hook/libcuda.so":
        assert needed == {"libcuda.so.1"}


@OLD_GLIBC
@pytest.mark.parametrize("library", sorted(NEEDED))
def test_asks_for_no_glibc_after_2_34(unpacked: pathlib.Path, library: str) -> None:
    """That of RHEL 9; Ubuntu 22.04 has 2.35. Names that are no number (GLIBC_ABI_...) are newer still."""
    asked = set(re.findall(r"Name: (GLIBC_\S+)", run(["readelf", "-VW", unpacked / library])))
    assert {name for name in asked if not re.fullmatch(r"GLIBC_2\.([0-9]|[12][0-9]|3[0-4])(\.\d+)*", name)} == set()


@OLD_GLIBC
def test_is_tagged_with_the_oldest_glibc_and_else_unchanged(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    printed = run([sys.executable, ROOT / "scripts/manylinux.py", wheel, tmp_path])
    (tagged,) = tmp_path.iterdir()
    assert printed.strip() == str(tagged)
    assert tagged.name == wheel.name.replace("-linux_", "-manylinux_2_34_")
    assert tagged.stat().st_size <= 5e6
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(tagged) as after:
        assert set(before.namelist()) == {name for name in after.namelist() if not name.endswith("/")}
        changed = [name for name in before.namelist() if before.read(name) != after.read(name)]
    assert {name.rpartition("/")[2] for name in changed} == {"RECORD", "WHEEL"}


def test_newer_glibc_is_refused_with_advice(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    newer = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(newer, "w") as target:
        for entry in source.infolist():
            target.writestr(entry, source.read(entry).replace(b"GLIBC_2.34\0", b"GLIBC_2.99\0"))
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/manylinux.py", newer, out], stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 1
    assert "too-recent" in done.stderr and "Debian 12" in done.stderr
    assert not out.exists() or list(out.iterdir()) == []


@pytest.mark.parametrize(("library", "soname"), sorted(LIBRARIES.items()))
def test_is_known_by_the_name_of_its_file(unpacked: pathlib.Path, library: str, soname: str) -> None:
    assert dynamic(unpacked / library, "SONAME") == [soname]


@pytest.mark.parametrize("library", sorted(NEEDED))
def test_looks_for_libraries_only_beside_itself(unpacked: pathlib.Path, library: str) -> None:
    """A run path of the build tree would find other libraries on the machine that built the wheel."""
    paths = dynamic(unpacked / library, "RUNPATH") + dynamic(unpacked / library, "RPATH")
    assert all(part.startswith("$ORIGIN") for path in paths for part in path.split(":"))


@pytest.mark.parametrize("library", ["cudasched/libcudasched.so", "cudasched/hook/libcuda.so.1"])
def test_is_never_unloaded(unpacked: pathlib.Path, library: str) -> None:
    """Programs keep the entry points they were given."""
    assert "NODELETE" in run(["readelf", "-dW", unpacked / library])


def test_engine_exports_its_c_boundary_and_nothing_else(unpacked: pathlib.Path) -> None:
    declared = set(
        re.findall(r"CUDASCHED_EXPORT[^;(]*?(cudasched_\w+)\(", (ROOT / "include/cudasched/engine.h").read_text())
    )
    assert len(declared) > 10
    assert exported(unpacked / "cudasched/libcudasched.so") == declared


def test_shim_exports_every_driver_symbol(unpacked: pathlib.Path) -> None:
    listed = set(run([sys.executable, ROOT / "csrc/hook/entry_points.py", "symbols"]).split())
    assert len(listed) > 600
    found = exported(unpacked / "cudasched/hook/libcuda.so.1")
    assert listed <= found
    # What is written at the end is written there, too (csrc/hook/shim.c).
    assert {name for name in found - listed if not name.startswith("cudasched_")} == {"_exit", "_Exit"}


def test_simulated_driver_exports_names_of_the_driver_alone(unpacked: pathlib.Path) -> None:
    found = exported(unpacked / "cudasched/simulate/libcuda.so.1")
    assert len(found) > 200
    assert {name for name in found if not re.fullmatch(r"cu[A-Z]\w+|cudasched_\w+", name)} == set()


def test_stub_exports_nothing(unpacked: pathlib.Path) -> None:
    assert exported(unpacked / "cudasched/hook/libcuda.so") == set()


def test_python_module_exports_its_entry_alone(unpacked: pathlib.Path) -> None:
    assert exported(unpacked / CORE) == {"PyInit__core", "cudasched_pool_allocate", "cudasched_pool_free"}
