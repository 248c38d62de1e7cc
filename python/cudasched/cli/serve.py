"""`cudasched serve`: a page and an interface by which clients are seen and changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cudasched.cli.run import configure
from cudasched.errors import ConfigError

__all__ = ["EXAMPLE", "command"]

EXAMPLE = "Example: cudasched serve --port 9465 --grpc-port 9466"

DEFAULT_PORT = 9465


def command(
    host: Annotated[
        str, typer.Option(help="The address to listen on. One that other machines reach needs TLS, or --insecure.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free, which is said.")] = DEFAULT_PORT,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Also serve gRPC on this port; 0: any that is free.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="The bearer token; made where missing. Default: serve.token in ~/.local/state/cudasched."),
    ] = None,
    audit_log: Annotated[
        Path | None, typer.Option(help="Who changed what. Default: audit.jsonl beside the default token file.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="The certificate, a PEM file with its chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's private key, a PEM file.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines in without TLS: the token can be read on the way.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Another name by which this server is called; may be given several times."),
    ] = None,
) -> int:
    """Serve a page and an interface by which this user's clients are seen and changed, until Ctrl-C or SIGTERM."""
    configure()
    try:
        from cudasched.serve._server import Server, is_loopback
    except ImportError:
        raise ConfigError("`cudasched serve` needs FastAPI and uvicorn: pip install 'cudasched[serve]'") from None
    from cudasched.serve._secret import AuditLog, state_directory, token_from
    from cudasched.serve._service import Service

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("TLS needs both --tls-cert and --tls-key")
    if not is_loopback(host) and tls_cert is None and not insecure:
        raise ConfigError(
            f"other machines reach {host}: give --tls-cert and --tls-key, or --insecure where the network is trusted"
        )
    token_path = token_file or state_directory() / "serve.token"
    token = token_from(token_path)
    audit = AuditLog(audit_log or state_directory() / "audit.jsonl")
    service = Service(audit)
    server = Server(
        service,
        token,
        host=host,
        port=port,
        grpc_port=grpc_port,
        certificate=tls_cert,
        key=tls_key,
        allowed_hosts=tuple(allowed_host or ()),
    )
    shown = f"[{host}]" if ":" in host else host
    # To a terminal, with the token: what follows the # is sent to no server. What may be a log does not get it.
    fragment = f"#token={token}" if sys.stderr.isatty() else ""
    print(f"cudasched: {server.scheme}://{shown}:{server.port}/{fragment}", file=sys.stderr)
    if server.grpc_port is not None:
        print(f"cudasched: gRPC at {shown}:{server.grpc_port}", file=sys.stderr)
    print(f"cudasched: the token is in {token_path}", file=sys.stderr, flush=True)
    audit.write("started", address=f"{shown}:{server.port}")
    try:
        server.run()
    finally:
        service.close()
        audit.write("ended")
        audit.close()
    return 0
