"""`cudasched.torch.install`: a class for a whole program that has no regions."""

from __future__ import annotations

import importlib
import threading
import warnings
from typing import Any

from cudasched import hook
from cudasched._region import set_class
from cudasched.config import check_region
from cudasched.errors import ConfigError, HookWarning
from cudasched.torch import _adapter, _give_back

__all__ = ["install"]

_lock = threading.Lock()
_installed: str | None = None


def install(default: str = "best_effort") -> None:
    """Gives all work of this program a class, with no region in it, and takes this thread off the default stream.

    ::

        import cudasched.torch
        cudasched.torch.install(default="best_effort")

    Regions and bound streams keep their classes. Side streams need nothing: work on them has the class of the launching
    thread. Work of autograd's threads and NCCL has the class of the streams that they serve. The calling thread works
    on a stream of its own from the first CUDA call on. So other threads' regions do not wait for its launches. Call
    this in the program's main thread, before models are built.

    Does nothing where it was called before with the same class, and, said once, without CUDA or without the hook.

    Args:
        default: ``"best_effort"``, ``"normal"`` or ``"latency"``.

    Raises:
        ConfigError: The class has no meaning, or another one was installed.
    """
    global _installed
    client_class = check_region(default, 0, None).client_class
    with _lock:
        if _installed == client_class:
            return
        if _installed is not None:
            raise ConfigError(
                f"install(default={default!r}): {_installed!r} is installed in this program; use regions, or "
                "cudasched.set_class"
            )
        _installed = client_class
    if not hook.installed():
        if not hook.switched_off():
            _adapter.say_once("cudasched is not in front of CUDA in this process (cudasched.state() says why)")
        return
    set_class(client_class)
    torch: Any = importlib.import_module("torch")
    caller = threading.get_ident()

    def leave_default() -> None:
        """PyTorch runs this when it initialises CUDA, or at once where that is done."""
        try:
            streams = _adapter.streams() if threading.get_ident() == caller else None
            if streams is not None:
                streams.leave_default()
            if client_class == "best_effort":
                _give_back.begin_if_built()
        except Exception as error:
            warnings.warn(
                f"work stays on the default stream: {type(error).__name__}: {error}", HookWarning, stacklevel=2
            )

    if torch.cuda.is_available():
        torch.cuda._lazy_call(leave_default)
    else:
        _adapter.say_once("PyTorch finds no CUDA device here")
