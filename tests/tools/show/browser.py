"""A headless Chromium, driven by the WebDriver protocol of its own driver; no library is needed."""

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request

ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync"
)
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


class Browser:
    """One window.

    Args:
        root: the address of the session.
    """

    def __init__(self, root):
        self.root = root

    def ask(self, path, **fields):
        return ask(self.root + path, fields)

    def open(self, page, width, height=900):
        self.ask("/window/rect", width=width, height=height)
        self.ask("/url", url=f"file://{page}")

    def run(self, script, *arguments):
        """What a function body in the page returns."""
        return self.ask("/execute/sync", script=script, args=list(arguments))

    def click(self, selector):
        """A real click in the middle of the first element that matches."""
        found = self.ask("/element", using="css selector", value=selector)
        self.ask(f"/element/{next(iter(found.values()))}/click")

    def command(self, name, **fields):
        """A command of the DevTools protocol."""
        return self.ask("/goog/cdp/execute", cmd=name, params=fields)

    def console(self):
        """What the page has written to the console since the last question: errors, mostly."""
        return [entry["message"] for entry in self.ask("/se/log", type="browser")]

    def shot(self, file, width, height, *, dark=False, scale=1):
        """Writes what is seen of the page, from its top, as a PNG."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale}
        self.command("Emulation.setDeviceMetricsOverride", **metrics, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        file.write_bytes(base64.b64decode(self.command("Page.captureScreenshot")["data"]))


def ask(address, fields=None):
    data = None if fields is None else json.dumps(fields).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]


@contextlib.contextmanager
def browser(folder):
    """A Chromium with a new profile in a folder.

    Raises:
        OSError: it does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [DRIVER, f"--port={port}", "--silent"]
    driver = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    root = f"http://127.0.0.1:{port}"
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                ask(f"{root}/status")
                break
            time.sleep(0.1)
        chromium = {"binary": CHROMIUM, "args": [*ARGUMENTS.split(), f"--user-data-dir={folder}"]}
        wanted = {"goog:chromeOptions": chromium, "goog:loggingPrefs": {"browser": "ALL"}}
        made = ask(f"{root}/session", {"capabilities": {"alwaysMatch": wanted}})
        session = Browser(f"{root}/session/{made['sessionId']}")
        try:
            yield session
        finally:
            end = urllib.request.Request(session.root, method="DELETE")
            urllib.request.urlopen(end, timeout=30)
    finally:
        driver.terminate()
        driver.wait()
