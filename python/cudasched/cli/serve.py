"""`cudasched serve`: a page and an interface by which clients are seen and changed."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudasched.cli.run import configure
from cudasched.errors import ConfigError

if TYPE_CHECKING:
    from cudasched.inference._processes import Processes
    from cudasched.serve._server import Server

__all__ = [
    "EXAMPLE",
    "AllowedHost",
    "GrpcPort",
    "Host",
    "Insecure",
    "Port",
    "TlsCert",
    "TlsKey",
    "TokenFile",
    "announce",
    "check",
    "command",
]

EXAMPLE = "Example: cudasched serve --port 9465 --grpc-port 9466"

DEFAULT_PORT = 9465

Host = Annotated[
    str, typer.Option(help="The address to listen on. One that other machines reach needs TLS, or --insecure.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free, which is said.")]
GrpcPort = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Also serve gRPC on this port; 0: any that is free.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="The bearer token; made where missing. Default: serve.token in ~/.local/state/cudasched."),
]
TlsCert = Annotated[Path | None, typer.Option(help="The certificate, a PEM file with its chain.")]
TlsKey = Annotated[Path | None, typer.Option(help="The certificate's private key, a PEM file.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Let other machines in without TLS: the token can be read on the way.")
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[:PORT]", help="Another name by which this server is called; may be given several times."
    ),
]


def check(host: str, tls_cert: Path | None, tls_key: Path | None, insecure: bool) -> None:
    """Raises ConfigError where a server so would let in whom it should not, or uvicorn is missing."""
    try:
        importlib.import_module("fastapi")
        from cudasched.serve._server import is_loopback
    except ImportError:
        raise ConfigError("a server needs FastAPI, uvicorn and httptools: pip install 'cudasched[serve]'") from None
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("TLS needs both --tls-cert and --tls-key")
    if not is_loopback(host) and tls_cert is None and not insecure:
        raise ConfigError(
            f"other machines reach {host}: give --tls-cert and --tls-key, or --insecure where the network is trusted"
        )


def announce(server: Server | Processes, host: str, path: str, token_path: Path) -> str:
    """Says on standard error where a server listens, and where its token is; returns its address with the port."""
    shown = f"[{host}]" if ":" in host else host
    address = f"{shown}:{server.port}"
    print(f"cudasched: {server.scheme}://{address}/{path}", file=sys.stderr)
    if server.grpc_port is not None:
        print(f"cudasched: gRPC at {shown}:{server.grpc_port}", file=sys.stderr)
    print(f"cudasched: the token is in {token_path}", file=sys.stderr, flush=True)
    return address


def command(
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
    grpc_port: GrpcPort = None,
    token_file: TokenFile = None,
    audit_log: Annotated[
        Path | None,
        typer.Option(help="The log of changes. Default: audit.jsonl beside the default token file."),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure: Insecure = False,
    allowed_host: AllowedHost = None,
    models: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A TOML file of recorded programs (docs/advise.md), to forecast."),
    ] = None,
    admission_image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Answer Kubernetes's admission webhook, too: pods copy cudasched from IMAGE."
        ),
    ] = None,
) -> int:
    """Serve a page and an interface by which this user's clients are seen and changed, until Ctrl-C or SIGTERM."""
    configure()
    check(host, tls_cert, tls_key, insecure)
    if admission_image is not None and not admission_image.strip():
        raise ConfigError("--admission-image names no image")
    from cudasched.advise import capacity
    from cudasched.serve import _admission
    from cudasched.serve._grpc import grpc_server
    from cudasched.serve._http import PUBLIC, application
    from cudasched.serve._secret import AuditLog, state_directory, token_from
    from cudasched.serve._server import Server
    from cudasched.serve._service import Service

    token_path = token_file or state_directory() / "serve.token"
    token = token_from(token_path)
    audit = AuditLog(audit_log or state_directory() / "audit.jsonl")
    service = Service(audit, programs=capacity.read(models) if models else None)
    server = Server(
        application(service),
        token,
        public=PUBLIC,
        wrong_token=service.wrong_token,
        grpc=partial(grpc_server, service),
        host=host,
        port=port,
        grpc_port=grpc_port,
        certificate=tls_cert,
        key=tls_key,
        allowed_hosts=tuple(allowed_host or ()),
        admission=_admission.application(admission_image) if admission_image else None,
    )
    # To a terminal, with the token: the part after the # is sent to no server. An output that may be a log does not get
    # the token.
    fragment = f"#token={token}" if sys.stderr.isatty() else ""
    audit.write("started", address=announce(server, host, fragment, token_path))
    try:
        server.run()
    finally:
        service.close()
        audit.write("ended")
        audit.close()
    return 0
