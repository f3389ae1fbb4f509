"""A headless Chromium over its own debugging protocol: no driver program is needed."""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import websocket

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class Browser:
    """One page; a context manager, made with a new empty folder for the profile.

    ``errors`` holds uncaught exceptions and console errors, ``requests`` every address asked for.
    """

    def __init__(self, profile: Path) -> None:
        program = next(filter(None, map(shutil.which, _NAMES)), None)
        if program is None:
            pytest.skip(f"no browser: none of {', '.join(_NAMES)} is installed")
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        self._number = 0
        self._process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._socket = websocket.create_connection(
                self._page(profile / "DevToolsActivePort"), suppress_origin=True, timeout=60
            )
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.send(f"{domain}.enable")
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _page(self, port_file: Path) -> str:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if port_file.exists() and (lines := port_file.read_text().split()):
                connection = http.client.HTTPConnection("127.0.0.1", int(lines[0]), timeout=20)
                connection.request("GET", "/json/list")
                targets = json.loads(connection.getresponse().read())
                connection.close()
                for target in targets:
                    if target["type"] == "page":
                        return str(target["webSocketDebuggerUrl"])
            time.sleep(0.1)
        raise TimeoutError("the browser did not open a page")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its result; events that come meanwhile are noted."""
        self._number += 1
        number = self._number
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.errors.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(self, path: Path) -> None:
        """Load a local file and wait until its load event has fired."""
        self._loaded = False
        self.send("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._note(json.loads(self._socket.recv()))

    def evaluate(self, expression: str) -> Any:
        """The JSON value of an expression in the page."""
        result = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def press(self, key: str, text: str = "") -> None:
        """A key stroke with its name and code; only keys whose two names are the same."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text)

    def move_to(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> Path:
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def begins_with(self, *selectors: str, widths: Sequence[int] = (420, 1280)) -> None:
        """On a first screen of each width, 900 pixels high, the first of each kind is whole."""
        for width in widths:
            self.resize(width, 900)
            for selector in selectors:
                box = f"document.querySelector('{selector}').getBoundingClientRect()"
                assert self.evaluate(f"{box}.bottom") <= 900, (width, selector)

    def needs_no_sideways_scroll(self, *widths: int) -> None:
        for width in widths:
            self.resize(width, 800)
            assert self.evaluate("document.documentElement.scrollWidth") <= width


@contextmanager
def opened(page: Path, profile: Path, width: int = 1200) -> Iterator[Browser]:
    """The page in a browser; what tests do on it causes no error and fetches nothing."""
    with Browser(profile) as browser:
        browser.resize(width, 900)
        browser.open(page)
        yield browser
        assert browser.errors == []
        assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
