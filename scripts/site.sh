#!/usr/bin/env bash
# The documents and the reference as a site in build/site, which opens from the disk. Any warning is an error: a link that
# leads nowhere, a page that the navigation lacks, a docstring that says other arguments than its function has.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup build
install_requirements "$venv" run site
export NO_MKDOCS_2_WARNING=1 # the versions are pinned
mkdocs build --strict # not --quiet, which hides warnings from --strict
echo "site passed: $(find build/site -name '*.html' | wc -l) pages in build/site"
