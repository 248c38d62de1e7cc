#!/usr/bin/env bash
# The documents and the reference as a site in build/site/VERSION, which opens from the disk. Any warning is an error: a link
# that leads nowhere, a page that the navigation lacks, a docstring that says other arguments than its function has. The
# versions that are there stay; a served page lets its reader choose among them, and the front leads to the newest.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup build
install_requirements "$venv" run site
export NO_MKDOCS_2_WARNING=1 # the versions are pinned
version="$(written_version)"
mkdocs build --strict --site-dir "build/site/$version" # not --quiet, which hides warnings from --strict
cd build/site
mapfile -t versions < <(printf '%s\n' */search/search_index.json | cut -d/ -f1 | sort -rV)
python -c 'import json, sys; print(json.dumps([{"version": v, "title": v, "aliases": []} for v in sys.argv[1:]]))' \
  "${versions[@]}" >versions.json
echo "<!doctype html><meta http-equiv=\"refresh\" content=\"0; url=${versions[0]}/index.html\">" >index.html
echo "site passed: $(find "$version" -name '*.html' | wc -l) pages in build/site/$version"
