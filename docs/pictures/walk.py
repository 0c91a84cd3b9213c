"""A walk through the page of `vitlab serve`, part by part, with a screenshot of each.

python docs/pictures/walk.py OUT [--models bundled:cifar10 ...]   # 1280 and 375 pixels wide, English and Chinese
python docs/pictures/walk.py                                      # docs/pictures/glassbox.png alone
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from draw import PHOTO, PICTURES, reduced
from PIL import Image

TABS = {
    "try": ".bars",
    "walk": "#step",
    "attention": "#attention[data-loaded=all]",
    "fewer": "#fewer-answers .bars",
    "more": "#mae-made[data-done]",
    "training": "#panel-training p, #panel-training select",
}


def visit(browser: Any, address: str, tabs: list[str], out: Path, width: int, locale: str) -> None:
    tab = browser.new_page(viewport={"width": width, "height": 900}, locale=locale)
    tab.goto(address)
    tab.wait_for_selector("#samples button:nth-child(5)")
    tab.set_input_files("#file", PHOTO)
    for name in tabs:
        tab.click(f"#tab-{name}")
        tab.wait_for_selector(TABS[name])
        if name == "attention":
            box = tab.locator("#attention").bounding_box()
            tab.mouse.move(box["x"] + 0.32 * box["width"], box["y"] + 0.32 * box["height"])
        tab.screenshot(path=out / f"{name}-{width}-{locale[:2]}.png", full_page=True)
    tab.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--models", nargs="*", default=[])
    args = parser.parse_args()
    command = [sys.executable, "-m", "vitlab", "serve", *args.models, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        said = next(line for line in server.stderr if "http://" in line)
        address = said[said.index("http://") :].split()[0]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            if args.out is None:
                visit(browser, address, ["attention"], PICTURES, 1280, "en-US")
                drawn = PICTURES / "attention-1280-en.png"
                (PICTURES / "glassbox.png").write_bytes(reduced(Image.open(drawn)))
                drawn.unlink()
            else:
                args.out.mkdir(parents=True, exist_ok=True)
                for width in (1280, 375):
                    for locale in ("en-US", "zh-CN"):
                        visit(browser, address, list(TABS), args.out, width, locale)
            browser.close()
    finally:
        server.terminate()
        server.wait(20)


if __name__ == "__main__":
    main()
