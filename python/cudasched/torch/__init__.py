"""cudasched and PyTorch: regions with streams of their own, and handovers between threads.

::

    import cudasched.torch                               # before torch
    import torch

    cudasched.torch.install(default="best_effort")       # a program without regions
    queue.put(cudasched.torch.handover(batch))           # from one thread to another

Nothing here need be called for ``with cudasched.region(...)`` to put a program's PyTorch work on streams of its class;
see ``docs/pytorch.md``. Importing this module does not import PyTorch.
"""

from __future__ import annotations

from cudasched.torch._callbacks import lightning_callback, trainer_callback
from cudasched.torch._check import StreamOrderWarning
from cudasched.torch._extension import ExtensionError
from cudasched.torch._give_back import give_back
from cudasched.torch._handover import Handover, handover
from cudasched.torch._install import install
from cudasched.torch._observe import Memory, Timeline, memory, memory_timeline, observe

__all__ = [
    "ExtensionError",
    "Handover",
    "Memory",
    "StreamOrderWarning",
    "Timeline",
    "give_back",
    "handover",
    "install",
    "lightning_callback",
    "memory",
    "memory_timeline",
    "observe",
    "trainer_callback",
]
