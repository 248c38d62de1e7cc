"""``cudasched models``: batchers over HTTP and gRPC."""

from __future__ import annotations

import math
import runpy
import signal
import sys
import traceback
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import cudasched
from cudasched.cli.serve import AllowedHost, GrpcPort, Host, Insecure, Port, TlsCert, TlsKey, TokenFile, check
from cudasched.errors import ConfigError

__all__ = ["app"]

app = typer.Typer(name="models", help="Models in batches by deadline (docs/inference.md).", no_args_is_help=True)

DEFAULT_PORT = 9467


@app.callback()
def _start() -> None:
    """Models in batches by deadline."""


@app.command(epilog="Example: cudasched models serve models.py --port 9467")
def serve(
    file: Annotated[Path, typer.Argument(help="A Python file whose `models` maps names to batchers.")],
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
    grpc_port: GrpcPort = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure: Insecure = False,
    allowed_host: AllowedHost = None,
    max_mib: Annotated[int, typer.Option(min=1, max=1024, help="The largest request, in MiB.")] = 16,
    fronts: Annotated[int, typer.Option(min=0, max=64, help="Processes that carry the protocol; 0: this one.")] = 0,
) -> int:
    """Serve the models of a file by the open inference protocol (KServe v2), until Ctrl-C or SIGTERM."""
    check(host, tls_cert, tls_key, insecure)
    try:
        from cudasched.inference._kserve_http import PUBLIC, application
    except ImportError:
        raise ConfigError("a server of models needs NumPy: pip install 'cudasched[serve]'") from None
    from cudasched.inference import Batcher
    from cudasched.inference._fronts import Fronts, Options
    from cudasched.inference._kserve import Models
    from cudasched.inference._kserve_grpc import grpc_server
    from cudasched.serve._guard import Limits
    from cudasched.serve._secret import state_directory, token_from
    from cudasched.serve._server import Server

    cudasched._activate(as_program=True)  # before the file loads CUDA
    sys.setswitchinterval(1e-4)  # else a batch that the GPU has done may wait 5 ms for another thread's Python
    if not file.is_file():
        raise ConfigError(f"{file} is no file")
    try:
        models = runpy.run_path(str(file)).get("models")
    except ConfigError:
        raise
    except Exception as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(file)]
        at = f" at line {lines[-1]}" if lines else ""
        raise ConfigError(f"{file} raised {type(error).__name__}{at}: {error}") from error
    if not isinstance(models, dict) or not models or not all(isinstance(each, Batcher) for each in models.values()):
        raise ConfigError(f'{file} has no batchers: it sets models = {{"name": Batcher(...)}}')
    token_path = token_file or state_directory() / "serve.token"
    token, names, body_bytes = token_from(token_path), tuple(allowed_host or ()), max_mib << 20
    with ExitStack() as batchers:
        for batcher in models.values():
            batchers.enter_context(batcher)
        offered = Models(models)
        server: Server | Fronts
        if fronts:
            options = Options(host, port, grpc_port, token_path, tls_cert, tls_key, names, body_bytes)
            server = Fronts(offered, fronts, options)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: server.stop())
            server.start()
        else:
            server = Server(
                application(offered),
                token,
                public=PUBLIC,
                grpc=partial(grpc_server, offered),
                host=host,
                port=port,
                grpc_port=grpc_port,
                certificate=tls_cert,
                key=tls_key,
                allowed_hosts=names,
                limits=Limits(body_bytes=body_bytes, per_s=math.inf),
            )
        shown, scheme = f"[{host}]" if ":" in host else host, "https" if tls_cert else "http"
        print(f"cudasched: {scheme}://{shown}:{server.port}/v2/models/{{{','.join(models)}}}", file=sys.stderr)
        if server.grpc_port is not None:
            print(f"cudasched: gRPC at {shown}:{server.grpc_port}", file=sys.stderr)
        print(f"cudasched: the token is in {token_path}", file=sys.stderr, flush=True)
        server.run()
    return 0
