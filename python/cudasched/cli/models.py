"""``cudasched models``: batchers over HTTP and gRPC."""

from __future__ import annotations

import gc
import runpy
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import cudasched
from cudasched.cli.serve import AllowedHost, GrpcPort, Host, Insecure, Port, TlsCert, TlsKey, TokenFile, announce, check
from cudasched.errors import ConfigError

if TYPE_CHECKING:
    from cudasched.serve._server import Server

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
        from cudasched.inference._fronts import Fronts, Options, server_of
        from cudasched.inference._kserve import Models
    except ImportError:
        raise ConfigError("a server of models needs NumPy: pip install 'cudasched[serve]'") from None
    from cudasched.inference import Batcher
    from cudasched.serve._secret import state_directory

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
    names, body_bytes = tuple(allowed_host or ()), max_mib << 20
    options = Options(host, port, grpc_port, token_path, tls_cert, tls_key, names, body_bytes)
    with ExitStack() as batchers:
        for batcher in models.values():
            batchers.enter_context(batcher)
        offered = Models(models)
        server: Server | Fronts
        if fronts:
            server = Fronts(offered, fronts, options)
            server.start()
        else:
            server = server_of(offered, options)
        gc.collect()
        gc.freeze()  # else a collection of all that PyTorch has made stops the process for 0.1 s now and then
        announce(server, host, f"v2/models/{{{','.join(models)}}}", token_path)
        server.run()
    return 0
