#!/usr/bin/env bash
# Sets the machine up, installs cudasched into .venv and runs the demo; table and plot land in demo-out/.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup build
install_package "$venv" plot
exec "$venv/bin/cudasched" demo "$@"
