"""PyTorch's cached memory, given back when latency work of another program needs it."""

from __future__ import annotations

import ctypes
import importlib
import threading
from typing import Any

from cudasched import hook
from cudasched.torch import _extension

__all__ = ["begin_if_built", "give_back"]

_lock = threading.Lock()
_begun = False
_looked = False
_library: _extension.Library | None = None  # its function stays the engine's


def give_back() -> None:
    """Has this program empty PyTorch's cache when another program's latency work runs out of GPU memory.

    Best-effort programs give memory back by themselves where the PyTorch extension is built (``cudasched torch
    build``). This call builds the extension, some ten seconds once on a machine, and begins at once. A native thread
    empties the cache, as ``torch.cuda.empty_cache()`` does, without the interpreter's lock; memory in use stays.
    Programs with latency work of their own give nothing. With the allocator ``cudaMallocAsync`` nothing is needed: the
    driver's pools are trimmed. Does nothing the second time, and without the hook.

    Raises:
        ExtensionError: The extension cannot be had; the message says why.
    """
    global _begun, _library
    with _lock:
        if _begun or not hook.installed():
            return
        torch: Any = importlib.import_module("torch")
        if torch.cuda.get_allocator_backend() != "native":
            return
        _library = _extension.load()
        engine = ctypes.CDLL(str(hook.locate().engine))
        engine.cudasched_use_cache(ctypes.cast(_library.release_cache, ctypes.c_void_p), None)
        _begun = True


def begin_if_built() -> None:
    """`give_back`, where that takes no compiler; once, and a failure costs the memory alone."""
    global _looked
    if _looked:
        return
    _looked = True
    try:
        if _extension.built(importlib.import_module("torch")):
            give_back()
    except Exception:  # the region goes on
        return
