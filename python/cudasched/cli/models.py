"""``cudasched models``: batchers over HTTP and gRPC."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    file: Annotated[Path, typer.Argument(help="A Python file whose `models` maps names to batchers, or functions.")],
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
    grpc_port: GrpcPort = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure: Insecure = False,
    allowed_host: AllowedHost = None,
    max_mib: Annotated[int, typer.Option(min=1, max=1024, help="The largest request, in MiB.")] = 16,
    fronts: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            help="Processes that carry the protocol; 0: this one, or one where functions make the models.",
        ),
    ] = 0,
) -> int:
    """Serve the models of a file by the open inference protocol (KServe v2), until Ctrl-C or SIGTERM."""
    check(host, tls_cert, tls_key, insecure)
    try:
        from cudasched.inference._file import loaded
        from cudasched.inference._kserve import Models
        from cudasched.inference._processes import Options, Processes, server_of
    except ImportError:
        raise ConfigError("a server of models needs NumPy: pip install 'cudasched[serve]'") from None
    from cudasched.inference import Batcher
    from cudasched.serve._secret import state_directory

    models = loaded(file)
    token_path = token_file or state_directory() / "serve.token"
    names, body_bytes = tuple(allowed_host or ()), max_mib << 20
    options = Options(host, port, grpc_port, token_path, tls_cert, tls_key, names, body_bytes)
    with ExitStack() as batchers:
        here = [each for each in models.values() if isinstance(each, Batcher)]
        for batcher in here:
            batchers.enter_context(batcher)
        server: Server | Processes
        if fronts or not here:
            server = Processes(file, models, max(fronts, 1), options)
            is_there = server.start()
        else:
            server, is_there = server_of(Models(models), options), True
        gc.collect()
        gc.freeze()  # else a collection of all that PyTorch has made stops the process for 0.1 s now and then
        try:
            if is_there:
                announce(server, host, f"v2/models/{{{','.join(models)}}}", token_path)
        except OSError:  # nobody reads it
            server.stop()
            raise
        finally:
            server.run()
    return 0
