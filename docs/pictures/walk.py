"""A walk through the page of `vitlab serve`: each place in a screenshot, 1280 and 375 pixels wide, English and Chinese.
It tells how long the first picture took, how much memory the server has, and what the browser complained of.

    python docs/pictures/walk.py                                 # docs/pictures/glassbox.png alone
    python docs/pictures/walk.py --out walk                      # the bundled models, at two widths in two languages
    python docs/pictures/walk.py --out walk --dark               # and as many in the dark
    python docs/pictures/walk.py --out walk --model vit_base     # a checkpoint; or a name, with random weights

It trains for some seconds, for the curves of a panel, and indexes a few photos, for the search.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draw import PHOTO, PICTURES, reduced
from PIL import Image
from sklearn.datasets import load_sample_image

import vitlab

PLACES = {  # name -> the state in the page's link, and what must be there
    "picture": ("#step=image", "#verdict, #answer p"),
    "attention": ("#layer=3&head=2&step=block", ".block.active"),
    "scores": ("#layer=2&head=2&step=scores", ".stage[data-step=scores].active"),
    "mlp": ("#layer=2&head=2&step=gelu", ".stage[data-step=gelu].active"),
    "heads": ("#panel=heads", "#all-heads canvas"),
    "compare": ("#panel=compare", "#panel .bars, #panel .card p"),
    "fewer": ("#panel=fewer", "#fewer-answers .bars"),
    "mae": ("#panel=mae", "#mae-made[data-done]"),
    "alike": ("#panel=alike", "#similarity"),
    "sentences": ("#panel=sentences", "#clip-answers canvas"),
    "search": ("#panel=search", "#search-ask"),
    "training": ("#panel=training", "#curves svg"),
}
DONE = '#status:text-is("Done."), #status:text-is("完成。")'  # the page's policy forbids scripts to look at it
COMMAND = (sys.executable, "-m", "vitlab")
LONGEST = 120_000  # milliseconds


class Site:
    """A server of its own, and what it says of its memory."""

    def __init__(self, address: str):
        self.address = address

    def megabytes(self) -> float:
        with urllib.request.urlopen(f"{self.address}/metrics") as answer:
            found = re.search(r"^process_resident_memory_bytes (\S+)", answer.read().decode(), re.MULTILINE)
        return float(found[1]) / 1e6 if found else float("nan")


@contextmanager
def serving(folder: Path, model: str | None) -> Iterator[Site]:
    """The bundled models or one other, with an index and a run that are made for it."""
    models = [] if model is None else [checkpoint(model, folder)]
    photos(folder / "photos")
    quick = ("run.epochs=5", "run.eval_every=1", f"run.dir={folder / 'runs' / 'digits'}")
    run("train", "digits", *quick)
    command = [*COMMAND, "serve", *models, "--runs", folder / "runs", "--port", "0"]
    if model is None:
        run("index", folder / "photos", "-o", folder / "photos.index", "--model", "bundled:clip")
        command += ["--index", folder / "photos.index"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        said: list[str] = []
        while not said or "http://" not in said[-1]:
            if not (line := server.stderr.readline()):
                raise RuntimeError("".join(said))
            said.append(line)
        yield Site(said[-1][said[-1].index("http://") :].split()[0].rstrip("/"))
    finally:
        server.terminate()
        server.wait(60)


def run(*args: object) -> None:
    subprocess.run([*COMMAND, *map(str, args)], check=True, capture_output=True)


def photos(folder: Path) -> None:
    """Three photos, and parts of them."""
    folder.mkdir()
    china, flower = (Image.fromarray(load_sample_image(f"{name}.jpg")) for name in ("china", "flower"))
    for name, photo in {"cat": Image.open(PHOTO), "flower": flower, "temple": china}.items():
        w, h = photo.size
        boxes = {"all": (0, 0, w, h), "left": (0, 0, w // 2, h), "right": (w // 2, 0, w, h)}
        for part, box in (boxes | {"middle": (w // 4, h // 4, 3 * w // 4, 3 * h // 4)}).items():
            photo.crop(box).save(folder / f"{name}, {part}.jpg")


def checkpoint(model: str, folder: Path) -> str:
    """A checkpoint as it is; of a model that is known by name, one with random weights."""
    if Path(model).exists() or ":" in model:
        return model
    return str(vitlab.save(vitlab.create(model), folder / model))


def visit(browser: Any, site: Site, out: Path, width: int, locale: str, theme: str, places: Sequence[str]) -> list[str]:
    """Screenshots of these places, and a line about the visit. What the browser complained of."""
    wrong: list[str] = []
    tab = browser.new_page(viewport={"width": width, "height": 900}, locale=locale, color_scheme=theme)
    tab.set_default_timeout(LONGEST)
    tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    before, began = site.megabytes(), time.perf_counter()
    tab.goto(site.address)
    tab.wait_for_selector(DONE)
    seconds = time.perf_counter() - began
    offered = {button.get_attribute("data-panel") for button in tab.locator("[data-panel]").all()}
    for name in places:
        link, shown = PLACES[name]
        if link.startswith("#panel=") and name not in offered:
            continue
        tab.goto("about:blank")  # a link of the same page would only change its state
        tab.goto(f"{site.address}/{link}")
        tab.wait_for_selector(DONE)
        tab.wait_for_selector(shown)
        if name == "search":
            tab.click("#search-ask")
            tab.wait_for_selector("#hits[data-drawn]")
        tab.wait_for_timeout(1000)  # the motion of the step
        tab.screenshot(path=out / f"{name}-{width}-{locale[:2]}-{theme}.png")
    after = site.megabytes()
    tab.close()
    told = f"{width:4d} px  {locale[:2]}  {theme:5s}  first picture {seconds:6.2f} s"
    print(f"{told}  memory {before:7.0f} -> {after:7.0f} MB  console errors: {'; '.join(wrong) or 'none'}", flush=True)
    return wrong


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the screenshots; default: glassbox.png alone")
    parser.add_argument("--model", metavar="NAME|CHECKPOINT", help="instead of the bundled models")
    parser.add_argument("--dark", action="store_true", help="in the dark too")
    args = parser.parse_args()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with serving(Path(made), args.model) as site:
            if args.out is None:
                wrong += visit(browser, site, Path(made), 1280, "en-US", "light", ("attention",))
                (PICTURES / "glassbox.png").write_bytes(reduced(Image.open(f"{made}/attention-1280-en-light.png")))
            else:
                args.out.mkdir(parents=True, exist_ok=True)
                for theme in ("light", "dark") if args.dark else ("light",):
                    for width in (1280, 375):
                        for locale in ("en-US", "zh-CN"):
                            wrong += visit(browser, site, args.out, width, locale, theme, list(PLACES))
        browser.close()
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
