"""`cudasched dashboard`: the tuner in a browser, by Streamlit. `_serve` starts it, `_app` is the page, `_plots` draws.

Anyone with access to the page can upload and run a kernel. So the page listens on 127.0.0.1, answers only under a path
that is a token, and keeps Streamlit's protection against requests from other sites.
"""

from __future__ import annotations

from cudasched.tune.dashboard._serve import Options, command_line, serve

__all__ = ["Options", "command_line", "serve"]
