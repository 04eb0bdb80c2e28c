"""`make screenshots`: the pages of `planc show` in docs/pictures, as Chromium shows them.

Each picture contains a digest of the text of its page. If the text changes, a test asks for new
pictures; colors and distances may change without them.
"""

import hashlib
import re
import struct
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from folders import FOLDERS, ROOT

sys.path.extend(FOLDERS)

import browser
from console import call

from planc.commands import show

PICTURES = ROOT / "docs" / "pictures"
PLAN = ("llama-3.1-8b", "llama", "--world-size", "64")
STEP = ("--batch", "64", "--seq", "8192", "--micro-batches", "8")
START, END = b"\x89PNG\r\n\x1a\n", b"IEND"
KEY = b"page\0"
SCALE = 0.84
"""The pixels of a picture for one of its window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screenshot:
    """What a picture shows.

    Args:
        plan: the model, the plan and its settings, as words of a command.
        step: further words of `planc show`.
        size: the pixels of the window.
        click: the element that is chosen.
    """

    plan: tuple[str, ...]
    step: tuple[str, ...] = ()
    size: tuple[int, int]
    dark: bool = False
    click: str = ""

    def page(self):
        code, text, error = call("show", *self.plan, *self.step, "-o", "-")
        assert code == 0, error
        return text

    def digest(self):
        """The digest of the page's text; without that of its verdict, which a cache has."""
        with mock.patch.object(show, "recall", lambda *_: mock.Mock(level="proved", text="proved")):
            page = self.page()
        text = re.sub(r"<(style|script)\b.*?</\1>|<[^>]*>", " ", page, flags=re.S)
        text = re.sub(r"\.py:\d+", ".py", text)  # lines of transformers
        return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()


SCREENSHOTS = {
    "show-wide.png": Screenshot(
        plan=(*PLAN, "--set", "tp=8"),
        step=STEP,
        size=(1500, 1264),
        click='[data-module="model.layers[0:31].self_attn.q_proj"]',
    ),
    "show-stages.png": Screenshot(
        plan=(*PLAN, "--set", "tp=4", "--set", "pp=4"), size=(400, 1428), dark=True
    ),
}


def digest_in(picture):
    """The digest that a PNG contains; empty if none."""
    at = len(START)
    while at < len(picture):
        (size,), kind = struct.unpack(">I", picture[at : at + 4]), picture[at + 4 : at + 8]
        body = picture[at + 8 : at + 8 + size]
        if kind == b"tEXt" and body.startswith(KEY):
            return body.removeprefix(KEY).decode()
        at += 12 + size
    return ""


def with_digest(picture, digest):
    body = b"tEXt" + KEY + digest.encode()
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    end = picture.rindex(END) - 4
    return picture[:end] + chunk + picture[end:]


def draw(window, shot, file, folder):
    code, _, error = call("check", *shot.plan)
    assert code == 0, error
    page = folder / "page.html"
    page.write_text(shot.page())
    width, height = shot.size
    window.open(page, max(width, 500), height)  # the least width of a window
    if shot.click:
        window.click(shot.click)
        window.run("scrollTo(0, 0)")
    window.shot(file, width, height, dark=shot.dark, scale=SCALE)
    from PIL import Image  # of diffusers

    with Image.open(file) as drawn:
        drawn.quantize(256).save(file, optimize=True)  # a third of the bytes
    file.write_bytes(with_digest(file.read_bytes(), shot.digest()))


def main():
    if not (browser.CHROMIUM and browser.DRIVER):
        sys.exit("screenshots need Debian's packages chromium and chromium-driver")
    with tempfile.TemporaryDirectory() as folder, browser.browser(folder) as window:
        for name, shot in SCREENSHOTS.items():
            draw(window, shot, PICTURES / name, Path(folder))


if __name__ == "__main__":
    main()
