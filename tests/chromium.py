"""Drive Debian's Chromium over its DevTools protocol: `apt-get install chromium`; tests without it are skipped."""

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="install Chromium: apt-get install chromium")

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0"),
)


class Tab:
    """A tab of the browser.

    Attributes:
        problems: errors of the page's script, and requests that its policy refused.
        requests: addresses that it asked for.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._calls = socket, 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=30))
            self._note(message)
            if message.get("id") == self._calls:
                assert "error" not in message, message
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        found, about = message.get("method"), message.get("params", {})
        if found == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(about["exceptionDetails"]))
        elif found == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.problems.append(about["entry"]["text"])
        elif found == "Network.requestWillBeSent" and not about["request"]["url"].startswith("data:"):
            self.requests.append(about["request"]["url"])

    def open(self, address: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not self.run(expression):
            assert time.monotonic() < end, f"not within {seconds} s: {expression}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        text = {"Enter": "\r", " ": " "}.get(key, "")
        number = {
            "ArrowLeft": 37,
            "ArrowRight": 39,
            "Escape": 27,
            "Tab": 9,
            "Enter": 13,
            " ": 32,
            "Home": 36,
            "End": 35,
        }
        about = {"key": key, "windowsVirtualKeyCode": number[key], "code": "Space" if key == " " else key}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def point(self, selector: str, across: float, *, click: bool = False) -> None:
        """Move the pointer to a share of an element's width, in the middle of its height."""
        box = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect(); "
            f"return [b.left, b.top, b.width, b.height] }})(document.querySelector({selector!r}))"
        )
        place = {"x": box[0] + across * box[2], "y": box[1] + box[3] / 2}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        content = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(content))


@contextmanager
def opened_tab(folder: Path) -> Iterator[Tab]:
    """Start the browser with its files in this folder; it ends with the context."""
    assert PROGRAM is not None
    port = folder / "profile" / "DevToolsActivePort"
    port.parent.mkdir(parents=True)
    command = [PROGRAM, *_FLAGS, f"--user-data-dir={port.parent}", "about:blank"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as browser:
        try:
            end = time.monotonic() + 60
            while not (port.exists() and port.read_text().strip()):
                assert browser.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < end, "the browser does not start"
                time.sleep(0.05)
            address = f"http://127.0.0.1:{port.read_text().split()[0]}/json/list"
            with urllib.request.urlopen(address) as answer:
                target = next(each for each in json.load(answer) if each["type"] == "page")
            # A browser that waits for its next page while a training runs may be too slow for pings.
            socket = connect(target["webSocketDebuggerUrl"], max_size=None, compression=None, ping_interval=None)
            with socket:
                yield Tab(socket)
                # Its helpers write files until it has closed itself.
                socket.send('{"id": 0, "method": "Browser.close"}')
                browser.wait(timeout=30)
        finally:
            browser.kill()
