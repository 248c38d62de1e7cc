"""Starts Streamlit so that only its user has access to the page.

The token is the first part of every address that Streamlit answers: without it there is no page, no session and nothing
to upload to.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cudasched._scratch import Scratch
from cudasched.errors import ConfigError
from cudasched.observe.prometheus import binding
from cudasched.tune._need import need
from cudasched.tune.database import Database, default_path

__all__ = ["SETTINGS", "Options", "command_line", "serve"]

#: The environment variable of the page's settings.
SETTINGS = "CUDASCHED_DASHBOARD"
#: Where Streamlit finds the token, in its environment, too: others can read a command line.
_BASE_PATH = "STREAMLIT_SERVER_BASE_URL_PATH"
#: Streamlit, which ends with its starter: the pipe at Streamlit's standard input is closed then.
_STREAMLIT = (
    "from cudasched._life import end_with; end_with(0); from streamlit.web.cli import main; main(prog_name='streamlit')"
)
_APP = Path(__file__).parent / "_app.py"
_UPLOAD_MB = 64
_PATIENCE_S = 10.0
_INTERRUPTED = 130


@dataclass(frozen=True)
class Options:
    """The dashboard's options.

    Attributes:
        address: The address to listen on.
        port: The port.
        any_address: Whether an address that other machines reach is allowed.
        database: The tuner's database.
        files: Recordings, `advise` reports and data sets that it offers.
    """

    address: str = "127.0.0.1"
    port: int = 8501
    any_address: bool = False
    database: Path | None = None
    files: tuple[Path, ...] = ()

    def check(self) -> None:
        """Refuses an address beyond this machine, unless it was asked for.

        Raises:
            ConfigError: The address is none, or is not allowed; a file is not there.
        """
        try:
            loopback = self.address == "localhost" or ipaddress.ip_address(self.address).is_loopback
        except ValueError:
            raise ConfigError(f"--address {self.address}: it is an IP address or localhost") from None
        if not loopback and not self.any_address:
            raise ConfigError(
                f"--address {self.address}: other machines could reach it, and anyone with the token can run code "
                "here; --any-address allows that"
            )
        if not 0 < self.port < 65536:
            raise ConfigError(f"--port {self.port}: it is 1 to 65535")
        for path in self.files:
            if not path.exists():
                raise ConfigError(f"{path}: there is no such file")


def command_line(options: Options) -> list[str]:
    """The command that runs the page."""
    flags = {
        "server.address": options.address,
        "server.port": options.port,
        "server.headless": "true",
        "server.enableXsrfProtection": "true",
        "server.enableCORS": "true",
        "server.maxUploadSize": _UPLOAD_MB,
        "server.fileWatcherType": "none",
        "server.enableStaticServing": "false",
        "browser.gatherUsageStats": "false",
        "browser.serverAddress": options.address,
        "client.showErrorDetails": "none",
        "client.toolbarMode": "minimal",
        "global.developmentMode": "false",
        "logger.level": "error",
    }
    settings = [f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-c", _STREAMLIT, "run", str(_APP), *settings]


def serve(options: Options) -> int:
    """Runs the dashboard until Ctrl-C, or until the terminal is closed. Returns the exit code.

    Raises:
        ConfigError: An option has no meaning, or is not allowed; the address cannot be had.
        Error: Streamlit is not installed, or the database cannot be opened.
    """
    options.check()
    need("streamlit", "the dashboard", "'cudasched[dashboard]'")
    Database(options.database or default_path()).close()  # the page could not say why
    with binding(options.address, options.port):  # nor could Streamlit, behind the address and the token
        family = socket.AF_INET6 if ":" in options.address else socket.AF_INET
        socket.create_server((options.address, options.port), family=family).close()
    token = secrets.token_urlsafe(24)
    with Scratch("dashboard") as directory:
        file = directory / "settings.json"
        settings = {
            "database": str(options.database) if options.database else None,
            "files": [str(path.resolve()) for path in options.files],
            "directory": str(directory),
        }
        file.touch(mode=0o600)
        file.write_text(json.dumps(settings))
        environment = {**os.environ, SETTINGS: str(file), _BASE_PATH: token, "CUDASCHED_OFF": "1"}
        # Streamlit reads ./.streamlit/config.toml: not one of the directory where this was started.
        host = f"[{options.address}]" if ":" in options.address else options.address
        # The command ends as by Ctrl-C: with its page.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup
                signal.signal(number, signal.default_int_handler)
        print(f"cudasched dashboard: http://{host}:{options.port}/{token}/", flush=True)
        process = subprocess.Popen(command_line(options), env=environment, cwd=directory, stdin=subprocess.PIPE)
        try:
            return process.wait()
        except KeyboardInterrupt:
            return _INTERRUPTED
        finally:
            process.terminate()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
