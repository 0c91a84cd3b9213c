"""A run -> report.html: one file that needs nothing else, neither network nor script, and can be mailed.

Curves and tables are SVG and HTML text, so the reader's own fonts draw every language; the page is also valid XML.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.parsing import flat, parse_toml
from vitlab.training.report.classes import class_tables
from vitlab.training.report.curves import charts
from vitlab.training.report.html import GalleryItem, escaped, gallery, name_html, number, section, table_of
from vitlab.version import __version__

REPORT = "report.html"
TILES = {  # key of result.json -> what it is called
    "top1": ("Top-1 accuracy", "准确率"),
    "top5": ("Top-5 accuracy", "前五准确率"),
    "loss": ("Loss", "损失"),
    "params": ("Parameters", "参数量"),
    "epochs": ("Epochs", "轮数"),
    "seconds": ("Training time", "训练用时"),
    "images_per_second": ("Images per second", "每秒图像数"),
}


@dataclass(frozen=True)
class RunReport:
    """The contents of report.html."""

    log: list[dict[str, Any]]
    recipe_text: str
    result: dict[str, Any]  # accuracies are shares of one
    classes: list[str]
    confusion: np.ndarray | None  # (K, K), rows = truth
    mistakes: list[GalleryItem]
    samples: list[GalleryItem]
    environment: dict[str, Any]


def write_report(folder: Path, report: RunReport) -> Path:
    """Write folder/report.html."""
    from vitlab.checkpoints.native import write_text

    folder = Path(folder)
    log, recipe_text, result, classes = report.log, report.recipe_text, report.result, report.classes
    confusion = report.confusion
    assert confusion is None or confusion.shape == (len(classes), len(classes)), (np.shape(confusion), len(classes))
    worst = sorted(report.mistakes, key=lambda m: -m.confidence)
    body = "\n".join(
        [
            _header(folder.resolve().name, log, recipe_text, result, len(classes)),
            section("Curves", "曲线", charts(log, labels=result.get("judged_by", "top-1") == "top-1")),
            section("Events", "事件", _events(log)),
            "" if confusion is None or not confusion.any() else class_tables(confusion, classes),
            section("Worst mistakes", "最严重的错误", gallery(worst, "Wrong, and most sure of it, first.")),
            section("Sample predictions", "预测示例", gallery(report.samples, "Images the model was not trained on.")),
            section("All numbers", "全部数值", table_of(result)),
            section("Recipe", "配方", f"<pre>{escaped(recipe_text.strip())}</pre>" if recipe_text.strip() else ""),
            section("Environment", "环境", table_of(report.environment)),
        ]
    )
    page = _asset("page.html").format(
        title=escaped(folder.resolve().name), style=f"\n{_asset('page.css')}", body=body, version=escaped(__version__)
    )
    path = folder / REPORT
    write_text(path, page)
    return path


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _header(name: str, log: list[dict[str, Any]], recipe_text: str, result: dict[str, Any], classes: int) -> str:
    try:
        recipe = flat(parse_toml(recipe_text))
    except ValueError:
        recipe = {}
    about = [" on ".join(name_html(recipe[key]) for key in ("model.name", "data.source") if recipe.get(key))]
    if "seed" in result:
        about.append(f"seed {number('seed', result['seed'])}")
    if log and log[-1].get("time"):
        ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(log[-1]["time"]))
        about.append(f'<time datetime="{ended[:10]}T{ended[11:16]}Z">{ended}</time>')
    line = " · ".join(part for part in about if part)
    names, judged = dict(TILES), str(result.get("judged_by", "top-1"))
    if judged != "top-1":  # k-NN, zero-shot or recall
        names["top1"] = (escaped(judged), TILES["top1"][1])
        names["loss"] = (escaped(f"Loss ({judged.removesuffix(' top-1')})"), TILES["loss"][1])
    tiles = [
        f'<div><dt>{title} <span lang="zh-CN">{chinese}</span></dt><dd>{number(key, result[key])}</dd></div>'
        for key, (title, chinese) in names.items()
        if key in result and not (key == "top5" and classes <= 10)  # five guesses of ten say little
    ]
    return f'<header>\n<h1>{name_html(name)}</h1>\n<p>{line}</p>\n</header>\n<dl class="tiles">{"".join(tiles)}</dl>'


def _events(log: list[dict[str, Any]], most: int = 40) -> str:
    """Notes, skipped images and other events that no curve shows."""
    events = [e for e in log if e["kind"] not in ("train", "val", "test", "start", "result")]
    rows = []
    for event in events[:most]:
        rest = {k: v for k, v in event.items() if k not in ("kind", "step", "time", "text", "message")}
        parts = [str(event[key]) for key in ("text", "message") if key in event]
        parts += [f"{key}: {value}" for key, value in flat(rest).items()]
        kind, step = escaped(event["kind"]), event["step"]
        rows.append(f'<tr><td>{step}</td><td>{kind}</td><td class="name">{escaped("; ".join(parts))}</td></tr>')
    if len(events) > most:
        rows.append(f"<tr><td></td><td></td><td>and {len(events) - most} more, in log.jsonl</td></tr>")
    head = "<tr><th>step</th><th>kind</th><th>what</th></tr>"
    return f'<div class="wide"><table class="events">{head}{"".join(rows)}</table></div>' if rows else ""
