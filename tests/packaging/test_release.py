"""`scripts/release.sh`: what it refuses before it builds anything."""

from __future__ import annotations

import pathlib
import subprocess

import pytest
from conftest import ROOT, copy_source

VERSION = "9.8.7"
GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "init.defaultBranch=main")


@pytest.fixture
def clone(tmp_path: pathlib.Path) -> pathlib.Path:
    """A clone in which a release is ready, but for its headers."""
    clone = copy_source(tmp_path / "clone")
    (clone / "python/cudasched/_version.py").write_text(f'__version__ = "{VERSION}"\n')
    changes = clone / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("## Unreleased", f"## {VERSION}, 2026-01-31"))
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "release")):
        subprocess.run([*GIT, *command], cwd=clone, check=True)
    return clone


def refused(clone: pathlib.Path, *arguments: str) -> str:
    done = subprocess.run(["scripts/release.sh", *arguments], cwd=clone, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "") and not (clone / "dist").exists()
    return done.stderr


def test_it_says_what_is_missing(clone: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert "which version?" in refused(clone)
    assert f"_version.py says {VERSION}, not 9.9" in refused(clone, "9.9")
    headers = str(tmp_path / "none")
    assert refused(clone, VERSION, headers) == f"error: {headers} has no headers of a Python\n"


def test_a_changed_tree_a_silent_changelog_and_a_tag_of_another_commit_are_refused(clone: pathlib.Path) -> None:
    (clone / "new").touch()
    assert "not committed" in refused(clone, VERSION)
    changes = clone / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace(f"## {VERSION}, 2026-01-31", f"## {VERSION}"))
    for command in (("add", "-A"), ("commit", "-qm", "silent"), ("tag", f"v{VERSION}", "HEAD~1")):
        subprocess.run([*GIT, *command], cwd=clone, check=True)
    assert f'CHANGELOG.md has no "## {VERSION}, YYYY-MM-DD"' in refused(clone, VERSION)
    changes.write_text(changes.read_text().replace(f"## {VERSION}", f"## {VERSION}, 2026-01-31"))
    subprocess.run([*GIT, "commit", "-qam", "said"], cwd=clone, check=True)
    assert f"the tag v{VERSION} is of another commit" in refused(clone, VERSION)


def test_the_changelog_has_a_page_for_the_next_release() -> None:
    assert "\n## Unreleased\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
