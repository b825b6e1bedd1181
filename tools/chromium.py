"""Headless Chromium over its debugging pipe: open a page, run script in it, see what it asked for.

DevTools protocol: https://chromedevtools.github.io/devtools-protocol/. Messages are JSON that ends
with a zero byte, on descriptors 3 (to the browser) and 4 (from it).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
FOUND = next(filter(None, map(shutil.which, _NAMES)), None)
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)


class Browser:
    """One page. `events` are the protocol's since the page was made."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest, self._number = b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        found = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], 60)
            assert ready, "Chromium does not answer"
            data = os.read(self._from, 1 << 16)
            assert data, "Chromium left"
            self._rest += data
        one, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(one))

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        found = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 20.0) -> None:
        """Wait for an expression to be true."""
        deadline = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < deadline, (script, self.run("document.body.innerText"))
            time.sleep(0.05)

    def open(self, url: str, width: int = 1200, height: int = 900) -> None:
        """Load a page at this size."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def scheme(self, name: str) -> None:
        """Prefer light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def type(self, selector: str, text: str) -> None:
        """Put text into a field, as a person does."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press and release a key of its own name."""
        known = {"key": key, "code": key, "windowsVirtualKeyCode": 13 if key == "Enter" else 0}
        self.send("Input.dispatchKeyEvent", type="keyDown", text="\r", **known)
        self.send("Input.dispatchKeyEvent", type="keyUp", **known)

    def screenshot(self) -> bytes:
        """A PNG of what is to be seen."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def complaints(self) -> list[str]:
        """Errors in the console, a broken policy among them."""
        out = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                out.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            if event.get("method") == "Runtime.exceptionThrown":
                out.append(str(params["exceptionDetails"]))
        return out

    def asked(self) -> list[str]:
        """Addresses that the page asked for."""
        named = (e for e in self.events if e.get("method") == "Network.requestWillBeSent")
        return [e["params"]["request"]["url"] for e in named]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium with a profile of its own, gone afterwards."""
    (in_read, in_write), (out_read, out_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium", ignore_cleanup_errors=True) as profile:
        assert FOUND is not None, f"none of {', '.join(_NAMES)} is on the PATH"
        script = f'exec 3<&{in_read} 4>&{out_write}; exec "$@"'
        command = ["bash", "-c", script, "bash", FOUND, *_FLAGS, f"--user-data-dir={profile}"]
        with open(os.devnull, "w") as nowhere:
            process = subprocess.Popen(
                command, pass_fds=(in_read, out_write), stdout=nowhere, stderr=nowhere
            )
        os.close(in_read)
        os.close(out_write)
        try:
            yield Browser(in_write, out_read)
        finally:
            os.close(in_write)  # it leaves when its pipe closes
            os.close(out_read)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
