"""A real Chromium without a screen, led by its DevTools protocol through a pipe: no port, no driver program."""

from __future__ import annotations

import base64
import fcntl
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import PATIENCE_S

FOUND = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page."""

    def __init__(self, profile: Path, width: int = 1600, height: int = 1000, dark: bool = False) -> None:
        assert FOUND
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # It expects the pipes at descriptors 3 and 4.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 100) for end in (to_browser, from_browser)]
        command = [FOUND, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += [f"--user-data-dir={profile}", f"--window-size={width},{height}", "--remote-debugging-pipe"]
        command += ["--disable-background-networking", "--disable-component-update", "--enable-unsafe-swiftshader"]
        command += ["--force-dark-mode"] if dark else []
        self._process = subprocess.Popen(
            [*command, "about:blank"],
            preexec_fn=lambda: [os.dup2(end, place) for place, end in enumerate(ends, 3)],
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(profile)},
        )
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self._buffer = b""
        self._number = 0
        self.errors: list[str] = []
        targets = self._ask("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            while b"\0" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\0")
                answer = json.loads(line)
                self._note(answer)
                if answer.get("id") == self._number:
                    assert "error" not in answer, f"{method}: {answer['error']}"
                    result: dict[str, Any] = answer["result"]
                    return result
            ready, _, _ = select.select([self._in], [], [], 1)
            if ready:
                got = os.read(self._in, 1 << 20)
                assert got, "Chromium has ended"
                self._buffer += got
        raise AssertionError(f"{method} has no answer")

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["params"]["exceptionDetails"]))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A method of the protocol, of the page."""
        return self._ask(method, self._session, **parameters)

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """What JavaScript gives, promises awaited."""
        result = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def upload(self, expression: str, path: Path) -> None:
        """Gives a file to what JavaScript gives, an input for files."""
        found = self.ask("Runtime.evaluate", expression=expression)["result"]["objectId"]
        self.ask("DOM.setFileInputFiles", files=[str(path)], objectId=found)

    def wait_for(self, expression: str) -> Any:
        """Until it is true."""
        end = time.monotonic() + PATIENCE_S
        value = None
        while time.monotonic() < end:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.2)
        raise AssertionError(f"never true: {expression}; the page says {self.evaluate('document.body.innerText')!r}")

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)


@contextmanager
def serving(directory: Path, extra: dict[str, Path] | None = None) -> Iterator[str]:
    """A directory, and single files beside it, by HTTP on loopback. Gives the address."""
    files = extra or {}

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def translate_path(self, path: str) -> str:
            name = path.partition("?")[0]
            return str(files[name]) if name in files else super().translate_path(path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
