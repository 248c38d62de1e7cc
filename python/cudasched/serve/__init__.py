"""`cudasched serve`: seeing and changing the clients of this machine over HTTP and gRPC, and a page for browsers.

`_service` has the operations, once; `_http` and `_grpc` hand them on and know of nothing else. `_guard` admits or
refuses callers. Needs ``pip install 'cudasched[serve]'``; ``docs/control.md`` describes the use.
"""
