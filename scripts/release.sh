#!/usr/bin/env bash
# Makes a release in dist/ and looks at it: the source, a wheel for each Python whose headers are named beside that of .venv, one
# for arm64, and their checksums. Nothing leaves this machine; the last lines say how to publish it.
#
#   scripts/release.sh VERSION [HEADERS...]      # such as 0.1.0 /usr/include/python3.12; ARM64=off leaves that wheel out
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ "$#" -gt 0 ] || die "which version? release.sh VERSION [HEADERS...]"
version="$1"
[ -z "$(git status --porcelain)" ] || die "there are changes that are not committed: git status"
written="$(written_version)"
[ "$version" = "$written" ] || die "python/cudasched/_version.py says $written, not $version"
grep -qE "^## $version, [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md || die "CHANGELOG.md has no \"## $version, YYYY-MM-DD\""
if tagged="$(git rev-parse --quiet --verify "v$version^{commit}")"; then
  [ "$tagged" = "$(git rev-parse HEAD)" ] || die "the tag v$version is of another commit, $(git rev-parse --short "$tagged")"
fi
for headers in "${@:2}"; do
  [ -f "$headers/patchlevel.h" ] || die "$headers has no headers of a Python"
done

rm -rf dist
scripts/wheel.sh
for headers in "${@:2}"; do scripts/wheel.sh "$headers"; done
[ "${ARM64:-on}" = off ] || scripts/wheel.sh arm64
export PATH="$venv/bin:$PATH"
python -c 'import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])' dist >/dev/null
python -m twine check --strict dist/*
(cd dist && sha256sum -- * >SHA256SUMS && cat SHA256SUMS)
say "to publish it: git tag -a v$version -m $version && git push origin v$version && python -m twine upload dist/*.whl dist/*.tar.gz"
