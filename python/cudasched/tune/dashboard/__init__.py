"""`cudasched dashboard`: the tuner in a browser, by Streamlit. `_serve` starts it, `_app` is the page, `_plots` draws.

Anyone with access to the page can upload a kernel, which is run: so it listens on 127.0.0.1, answers under a path that
is a token and nowhere else, and keeps Streamlit's protection against requests from other sites on.
"""

from __future__ import annotations

from cudasched.tune.dashboard._serve import Options, command_line, serve

__all__ = ["Options", "command_line", "serve"]
