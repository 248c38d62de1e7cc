"""Starting Streamlit with what keeps the page to its user."""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cudasched._scratch import Scratch
from cudasched.errors import ConfigError
from cudasched.tune._need import need

__all__ = ["SETTINGS", "TOKEN", "Options", "command_line", "serve", "token_matches"]

#: Where the page finds its settings, in its environment; the token is in the file, which its user alone may read.
SETTINGS = "CUDASCHED_DASHBOARD"
TOKEN = "token"
_APP = Path(__file__).parent / "_app.py"
_UPLOAD_MB = 64
_PATIENCE_S = 10.0
_INTERRUPTED = 130


@dataclass(frozen=True)
class Options:
    """What the dashboard is started with.

    Attributes:
        address: Where it listens.
        port: Its port.
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
    return [sys.executable, "-m", "streamlit", "run", str(_APP), *settings]


def token_matches(given: str | None, token: str) -> bool:
    """Compares in a time that does not depend on the content."""
    return hmac.compare_digest((given or "").encode(), token.encode())


def serve(options: Options) -> int:
    """Runs the dashboard until Ctrl-C. Returns its exit code.

    Raises:
        ConfigError: An option has no meaning, or is not allowed.
        Error: Streamlit is not installed.
    """
    options.check()
    need("streamlit", "the dashboard", "'cudasched[dashboard]'")
    token = secrets.token_urlsafe(24)
    with Scratch("dashboard") as directory:
        file = directory / "settings.json"
        settings = {
            TOKEN: token,
            "database": str(options.database) if options.database else None,
            "files": [str(path.resolve()) for path in options.files],
            "directory": str(directory),
        }
        file.touch(mode=0o600)
        file.write_text(json.dumps(settings))
        environment = {**os.environ, SETTINGS: str(file), "CUDASCHED_OFF": "1"}
        # Streamlit reads ./.streamlit/config.toml: not one of the directory where this was started.
        host = f"[{options.address}]" if ":" in options.address else options.address
        # It ends as by Ctrl-C: with its page.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        print(f"cudasched dashboard: http://{host}:{options.port}/?{TOKEN}={token}", flush=True)
        process = subprocess.Popen(command_line(options), env=environment, cwd=directory, stdin=subprocess.DEVNULL)
        try:
            return process.wait()
        except KeyboardInterrupt:
            return _INTERRUPTED
        finally:
            signal.signal(signal.SIGTERM, before)
            process.terminate()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
