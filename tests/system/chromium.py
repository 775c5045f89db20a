"""A headless Chromium, driven over its DevTools protocol: pages, keys, the pointer, pictures, and what went wrong."""

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

PATIENCE_SECONDS = 120.0
"""Limit of a wait for something that is known to come, on a machine with other work."""
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "Escape": 27, "Tab": 9}


class Page:
    """A tab of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._next = socket, 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        """Exceptions, refused loads and errors of the console."""
        self.requests: list[str] = []
        """Addresses that the page has asked for."""
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            value = json.loads(message.data)
            if "id" in value:
                self._answers.pop(value["id"]).set_result(value)
                continue
            method, given = value["method"], value.get("params", {})
            if method == "Runtime.exceptionThrown":
                details = given["exceptionDetails"]
                self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
            elif method == "Log.entryAdded" and given["entry"]["level"] == "error":
                self.errors.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
            elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "assert"):
                self.errors.append(json.dumps(given["args"]))
            elif method == "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])
            elif method == "Page.javascriptDialogOpening":
                self.errors.append(f"a dialog: {given['message']}")

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command; return its result."""
        self._next += 1
        answer = self._answers[self._next] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._next, "method": method, "params": parameters})
        value = await asyncio.wait_for(answer, PATIENCE_SECONDS)
        assert "error" not in value, (method, value["error"])
        return dict(value["result"])

    async def start(self) -> None:
        """Listen to what the page does."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        # a window without the focus tells no element that it has it
        await self.send("Emulation.setFocusEmulationEnabled", enabled=True)

    async def size(self, width: int, height: int, dark: bool = False) -> None:
        """Give the page a size, and a preference for dark or light."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        # a scrollbar would take the right margin of a picture
        await self.send("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, address: str) -> None:
        """Go to an address, and wait until the page is whole."""
        await self.send("Page.navigate", url=address)
        await self.until("document.readyState === 'complete'")
        await self.ready()

    async def ready(self) -> None:
        """Wait until the application has drawn its page."""
        await self.until("document.querySelector('main')?.getAttribute('aria-busy') === 'false'")

    async def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Return the first true value of an expression."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):  # the page is just being replaced
                if found := await self.value(expression):
                    return found
            await asyncio.sleep(0.05)
        raise AssertionError(f"not within {PATIENCE_SECONDS:g} s: {expression}; errors: {self.errors}")

    async def texts(self, selector: str) -> list[str]:
        """Return the texts of the elements that a selector finds."""
        quoted = json.dumps(selector)
        return list(await self.value(f"[...document.querySelectorAll({quoted})].map((one) => one.innerText)"))

    async def press(self, *keys: str) -> None:
        """Press keys, one after the other."""
        for key in keys:
            code = {"windowsVirtualKeyCode": KEYS[key]} if key in KEYS else {"text": key}
            await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **code)
            await self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def point(self, selector: str, click: bool = False) -> None:
        """Move the pointer to the middle of an element, and press the button there."""
        quoted = json.dumps(selector)
        await self.until(f"!!document.querySelector({quoted})")
        box = await self.value(
            f"(() => {{ const one = document.querySelector({quoted}); one.scrollIntoView({{block: 'center'}});"
            " const box = one.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        at = {"x": box[0], "y": box[1]}
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", **at)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                await self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    async def picture(self, path: Path, whole: bool = False) -> bytes:
        """Write a picture of the window, or of the whole page; return its bytes."""
        clip: dict[str, Any] = {}
        if whole:
            size = (await self.send("Page.getLayoutMetrics"))["cssContentSize"]
            height = min(size["height"], 6000)
            clip = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": height, "scale": 1}}
        found = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip)
        data = base64.b64decode(found["data"])
        path.write_bytes(data)
        return data

    async def unnamed(self) -> list[str]:
        """Return the controls that a screen reader could not name."""
        nodes = (await self.send("Accessibility.getFullAXTree"))["nodes"]
        roles = ("button", "link", "textbox", "searchbox", "combobox", "spinbutton", "checkbox", "image", "img")
        return [
            json.dumps(node.get("properties", []))
            for node in nodes
            if not node.get("ignored")
            and node.get("role", {}).get("value") in roles
            and not node.get("name", {}).get("value")
        ]

    async def findings(self, axe: str) -> list[str]:
        """Return the findings of axe-core that are serious or critical, each with its rule and its element.

        Args:
            axe: source of axe-core.
        """
        # evaluated by the debugger, so the page's policy for scripts stays as strict as it is
        await self.value(f"{axe}; undefined")
        found = await self.value(
            "axe.run(document, {resultTypes: ['violations']}).then((result) => result.violations"
            ".filter((one) => ['serious', 'critical'].includes(one.impact)).flatMap((one) => one.nodes.map((node) =>"
            " `${one.id} (${one.impact}): ${node.html.slice(0, 200)} ${node.failureSummary}`)))"
        )
        return list(found)

    async def close(self) -> None:
        """Stop listening."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader


@contextlib.asynccontextmanager
async def browser(program: str) -> AsyncIterator[Page]:
    """A browser with an empty profile and one tab, until the end of the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            program,
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "--disable-gpu",
        ]
        command += ["--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync"]
        # Chromium refuses its sandbox to root
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        process = subprocess.Popen([*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await _port(Path(profile), process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    tabs = await response.json()
                address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    await page.start()
                    yield page
                    await page.close()
        finally:
            process.terminate()
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _port(profile: Path, process: "subprocess.Popen[bytes]") -> int:
    """Return the port of the protocol, which the browser writes to its profile."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the browser has exited with {process.returncode}"
        with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
            return int((profile / "DevToolsActivePort").read_text().split()[0])
        await asyncio.sleep(0.05)
    raise AssertionError(f"no browser within {PATIENCE_SECONDS:g} s")
