#!/usr/bin/env bash
# A robust mutex is none under qemu-user: when its owner dies, it stays locked, and no call has said so before.
#
# The kernel frees a robust mutex's lock by the list that glibc registers (set_robust_list). qemu-user answers that call
# with ENOSYS, and glibc does not look at the answer. So pthread_mutexattr_setrobust() and pthread_mutex_init() return
# 0, and the next process gets EBUSY, or waits for ever, where it gets EOWNERDEAD otherwise. Containers of another
# architecture run so: what recovers from a killed process by such a mutex in shared memory does not recover there.
# Give the lock a time limit (pthread_mutex_timedlock), and see by the owner's pid if it lives.
#
# Seen with qemu-user-static 7.2+dfsg-7+deb12u18+b3, glibc 2.36, CPython 3.11.7, Linux 6.18, 2026-11-28:
#     by itself: setrobust 0, init 0, lock 0, the owner ends, trylock EOWNERDEAD
#     by qemu: setrobust 0, init 0, lock 0, the owner ends, trylock EBUSY
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
(cd "$folder" && apt-get download -qq -o APT::Sandbox::User=root qemu-user-static)
dpkg -x "$folder"/qemu-user-static_*.deb "$folder/qemu"
cat > "$folder/mutex.py" <<'PYTHON'
import ctypes
import errno
import mmap
import os

PTHREAD_PROCESS_SHARED = PTHREAD_MUTEX_ROBUST = 1
library = ctypes.CDLL(None)
memory = mmap.mmap(-1, mmap.PAGESIZE)
mutex = ctypes.byref(ctypes.c_char.from_buffer(memory))
attributes = ctypes.create_string_buffer(64)
library.pthread_mutexattr_init(attributes)
library.pthread_mutexattr_setpshared(attributes, PTHREAD_PROCESS_SHARED)
robust = library.pthread_mutexattr_setrobust(attributes, PTHREAD_MUTEX_ROBUST)
made = library.pthread_mutex_init(mutex, attributes)
child = os.fork()
if child == 0:
    os._exit(library.pthread_mutex_lock(mutex))
locked = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
then = library.pthread_mutex_trylock(mutex)
calls = f"setrobust {robust}, init {made}, lock {locked}"
print(f"{calls}, the owner ends, trylock {errno.errorcode.get(then, then)}")
PYTHON
python=$(python3 -c 'import sys; print(sys.executable)') # no script in between, which qemu cannot run
qemu=$folder/qemu/usr/bin/qemu-$(uname -m)-static
"$qemu" --version | head -n 1
"$python" -c 'import platform; print(*platform.libc_ver(), "Python", platform.python_version())'
itself=$("$python" "$folder/mutex.py")
emulated=$("$qemu" "$python" "$folder/mutex.py")
echo "by itself: $itself"
echo "by qemu: $emulated"
[[ $itself == *EOWNERDEAD && $emulated == "setrobust 0, init 0, lock 0"*EBUSY ]]
