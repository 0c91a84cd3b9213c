"""Draws the pictures of the pages again, each by the command (or the Python code) that stands below it.

    python docs/pictures/draw.py                    # all of them
    python docs/pictures/draw.py rollout features   # these

They are stored with 256 colours, so that they stay small. page.png is a screenshot of attention.html, by Chromium.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import numpy as np
from PIL import Image

import vitlab.cli.main

PICTURES = Path(__file__).parent
PAGE = PICTURES.parent / "en" / "look_inside.md"
PHOTO = PICTURES / "chelsea.jpg"
LIMIT = 200_000  # bytes
CLOSE = 1.0  # of 255, mean over all pixels
BELOW = re.compile(r"!\[[^\]]+\]\(\.\./pictures/(\w+)\.png\)\n\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sources(text: str) -> Iterator[tuple[str, str, str]]:
    """(name, language, code) of every picture of a page: the code below it, or its first command."""
    for name, language, code in BELOW.findall(text):
        yield name, language, code if language == "python" else code.splitlines()[0]


def run(command: str) -> None:
    """A command of vitlab, in this process; it ends with the exit code 0, or that is an error."""
    before, sys.argv = sys.argv, shlex.split(command)
    try:
        vitlab.cli.main.run()
    except SystemExit as stopped:
        if stopped.code:
            raise RuntimeError(f"exit code {stopped.code}: {command}") from None
    finally:
        sys.argv = before


def reduced(picture: Image.Image) -> bytes:
    """A PNG of 256 colours below the limit; dithered where so few would show, and where that leaves room."""
    full = picture.convert("RGB")
    plain = full.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=4)
    dithered = full.quantize(palette=plain, dither=Image.Dither.FLOYDSTEINBERG)
    off = np.abs(np.subtract(plain.convert("RGB"), full, dtype=float)).mean()
    for small in (plain,) if off < CLOSE else (dithered, plain):
        written = io.BytesIO()
        small.save(written, "PNG", optimize=True)
        if written.tell() < LIMIT:
            return written.getvalue()
    raise RuntimeError(f"{picture.size[0]} x {picture.size[1]} pixels take {written.tell()} bytes: draw less.")


def screenshot(page: Path, target: Path) -> None:
    """The page while the pointer rests on the cat's left eye."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1000, "height": 745})
        tab.goto(page.as_uri())
        tab.select_option("#layer", label="layer 0")
        box = tab.locator("#view").bounding_box()
        assert box is not None
        tab.mouse.move(box["x"] + 0.377 * box["width"], box["y"] + 0.377 * box["height"])
        tab.screenshot(path=target)
        browser.close()


def main(names: list[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        shutil.copy(PHOTO, ".")
        for name, language, code in sources(text):
            if names and name not in names:
                continue
            if language == "python":
                exec(compile(code, PAGE.name, "exec"), {})
            else:
                run(code)
            if name == "page":
                screenshot(Path("attention.html").resolve(), Path("page.png"))
            (PICTURES / f"{name}.png").write_bytes(reduced(Image.open(f"{name}.png")))


if __name__ == "__main__":
    main(sys.argv[1:])
