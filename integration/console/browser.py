"""A real browser without a window, driven over its own pipe: no driver, no port, no package.

Every wait has a deadline. What the page logs, throws and asks for is kept.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""Programs that speak its protocol."""

DEADLINE_SECONDS = 30.0
"""For one answer, and for a condition of the page: the machine may be building something else."""


def program() -> str | None:
    """Where one is, if there is any."""
    named = os.environ.get("KVSTRATA_BROWSER")
    return named or next((found for found in map(shutil.which, NAMES) if found), None)


class Browser:
    """One page of it."""

    def __init__(self, home: Path) -> None:
        found = program()
        assert found is not None, "no browser: scripts/setup.sh --tests installs one"
        theirs, self._ask = os.pipe()
        self._told, ours = os.pipe()
        # It reads from 3 and writes to 4; a shell moves the ends there.
        moved = f'exec 3<&{theirs} 4>&{ours}; exec "$0" "$@"'
        flags = [
            "--headless",
            "--remote-debugging-pipe",
            f"--user-data-dir={home}",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--hide-scrollbars",
            "--lang=en-US",
        ]
        if os.geteuid() == 0:
            # As root it has no sandbox; what it opens is this repository's own page.
            flags.append("--no-sandbox")
        self._process = subprocess.Popen(
            ["bash", "-c", moved, found, *flags, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(home.parent / "browser.log").open("ab"),
            pass_fds=(theirs, ours),
        )
        os.close(theirs)
        os.close(ours)
        self._number = 0
        self._read = b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.statuses: dict[str, int] = {}
        self._loaded = False
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        os.close(self._ask)
        os.close(self._told)

    def size(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        """Makes the window so large, in pixels of CSS."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Goes to a page, and returns when its scripts have run; what the page before did is
        forgotten."""
        self.errors.clear()
        self.requests.clear()
        self._loaded = False
        self._call("Page.navigate", url=url)
        end = time.monotonic() + DEADLINE_SECONDS
        while not self._loaded:
            self._note(self._next(end, f"the page {url}"))

    def run(self, expression: str) -> Any:
        """What an expression of the page is, once it is settled."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Waits until an expression of the page is true; returns what it is then."""
        end = time.monotonic() + DEADLINE_SECONDS
        while True:
            found = self.run(condition)
            if found:
                return found
            said = self.run("document.body && document.body.innerText")
            assert time.monotonic() < end, f"never: {condition}\n{said}\n{self.errors}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """The text of the first element that a selector finds, as a reader sees it."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def type(self, text: str) -> None:
        """Types into whatever has the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Presses and releases a key, like `Tab` or `ArrowLeft`."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "End": 35, "Home": 36}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        if key == "Enter":
            event["text"] = "\r"
        self._call("Input.dispatchKeyEvent", type="keyDown", **event)
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Writes what is seen as a PNG: the whole page, or what the window shows of it."""
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        asked: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._ask, json.dumps(asked).encode() + b"\0")
        end = time.monotonic() + DEADLINE_SECONDS
        while True:
            told = self._next(end, method)
            if told.get("id") == number:
                assert "error" not in told, (method, told["error"])
                return dict(told["result"])
            self._note(told)

    def _next(self, end: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._told], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser did not answer {method}"
            more = os.read(self._told, 1 << 20)
            assert more, "the browser has ended"
            self._read += more
        message, self._read = self._read.split(b"\0", 1)
        return dict(json.loads(message))

    def _note(self, told: dict[str, Any]) -> None:
        method, params = told.get("method"), told.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Network.responseReceived":
            self.statuses[params["response"]["url"]] = params["response"]["status"]
