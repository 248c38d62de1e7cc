#!/usr/bin/env bash
# Installs wheels in new roots of Debian 12, Ubuntu 22.04 and 24.04, and Debian 14 (testing) and runs the demo in each, as root. A wheel that
# dist/ lacks is made, with the headers that the root's own Python has. `roots.sh SUITE...` takes some of them.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
asked="${*:-bookworm jammy noble forky}"
for suite in $asked; do
  [[ " bookworm jammy noble forky " = *" $suite "* ]] || die "no suite '$suite'; there are bookworm, jammy, noble and forky"
done
command -v mmdebstrap >/dev/null || apt_install mmdebstrap
keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg
trusted=""
[ -f "$keyring" ] || trusted="[trusted=yes]" # these roots are thrown away
ubuntu="deb $trusted http://archive.ubuntu.com/ubuntu"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
compgen -G "dist/cudasched-*x86_64.whl" >/dev/null || scripts/wheel.sh

# Runs in a root: the wheel of its Python, and the demo.
inside='set -e
mount -t proc none /proc
mount -t tmpfs -o mode=1777 none /dev/shm
python3 -m venv /opt/environment
/opt/environment/bin/pip install -q /dist/cudasched-*-cp"$1"-*x86_64.whl
cd /tmp
/opt/environment/bin/cudasched demo --simulate --seconds 1'

failed=0
tried() { # tried SUITE VERSION COMPONENTS
  local tree="$scratch/$1" digits="${2/./}" headers="$scratch/headers-$1"
  say "$1, Python $2"
  # A mirror may keep testing for longer than its list is valid.
  mmdebstrap --quiet --variant=minbase --aptopt='Acquire::Check-Valid-Until "false"' \
    --include=python3-venv,ca-certificates,libpython3-dev "$1" "$tree" ${3:+"$3"} || return
  if ! compgen -G "dist/cudasched-*-cp$digits-*x86_64.whl" >/dev/null; then
    cp -r "$tree/usr/include/python$2" "$headers"
    cp "$tree/usr/include/x86_64-linux-gnu/python$2/pyconfig.h" "$headers/" # in the place of one that includes it
    scripts/wheel.sh "$headers" || return
  fi
  mkdir "$tree/dist"
  cp dist/cudasched-*-cp"$digits"-*x86_64.whl "$tree/dist/"
  cp /etc/resolv.conf "$tree/etc/"
  [ -z "${PIP_CERT:-}" ] || cp "$PIP_CERT" "$tree/etc/pip.crt"
  unshare --mount --pid --fork chroot "$tree" env -i PATH=/usr/bin:/bin HOME=/root PIP_CERT="${PIP_CERT:+/etc/pip.crt}" \
    sh -c "$inside" sh "$digits"
}
for each in "bookworm 3.11 " "jammy 3.10 $ubuntu jammy main universe" "noble 3.12 $ubuntu noble main universe" "forky 3.14 "; do
  read -r suite version components <<<"$each"
  [[ " $asked " = *" $suite "* ]] || continue
  tried "$suite" "$version" "$components" || failed=$((failed + 1))
done
echo "$failed roots failed of: $asked"
exit "$((failed > 0 ? 8 : 0))" # as ctest does
