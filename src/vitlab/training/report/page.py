"""A run -> report.html: one file that needs nothing else, neither network nor script, and can be mailed.

Curves and tables are SVG and HTML text, so the reader's own fonts draw every language; the page is also valid XML.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.parsing import parse_toml
from vitlab.training.report.classes import class_tables
from vitlab.training.report.curves import charts
from vitlab.training.report.pictures import GalleryItem, gallery
from vitlab.training.report.text import escaped, name_html, number, section, table_of
from vitlab.training.runs import flat
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
    from vitlab.checkpoints.native import write_whole

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
            section(
                "Sample predictions", "预测示例", gallery(report.samples, "Pictures the model was not trained on.")
            ),
            section("All numbers", "全部数值", table_of(result)),
            section("Recipe", "配方", f"<pre>{escaped(recipe_text.strip())}</pre>" if recipe_text.strip() else ""),
            section("Environment", "环境", table_of(report.environment)),
        ]
    )
    page = PAGE.format(title=escaped(folder.resolve().name), style=STYLE, body=body, version=escaped(__version__))
    path = folder / REPORT
    write_whole(path, lambda temporary: temporary.write_text(page, encoding="utf-8"))
    return path


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
    if judged != "top-1":  # neighbours, or words
        names["top1"] = (escaped(judged), TILES["top1"][1])
        names["loss"] = (escaped(f"Loss ({judged.removesuffix(' top-1')})"), TILES["loss"][1])
    tiles = [
        f'<div><dt>{title} <span lang="zh-CN">{chinese}</span></dt><dd>{number(key, result[key])}</dd></div>'
        for key, (title, chinese) in names.items()
        if key in result and not (key == "top5" and classes <= 10)  # five guesses of ten say little
    ]
    return f'<header>\n<h1>{name_html(name)}</h1>\n<p>{line}</p>\n</header>\n<dl class="tiles">{"".join(tiles)}</dl>'


def _events(log: list[dict[str, Any]], most: int = 40) -> str:
    """What is neither a curve nor a start: notes, skipped images, resumes."""
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


PAGE = """<!DOCTYPE html>
<html lang="en" xmlns="http://www.w3.org/1999/xhtml">
<head>
<meta charset="utf-8" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'" />
<title>{title} · vitlab</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
<footer>vitlab {version}</footer>
</main>
</body>
</html>
"""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #f6f6f3; --card: #ffffff; --ink: #1c2126; --soft: #646d78; --line: #e2e4e6;
  --train: #2f6fd0; --val: #d4700c; --test: #1f8f6f; --right: #1f8f6f; --wrong: #d1432b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #111417; --card: #191d21; --ink: #e7e9ec; --soft: #98a2ad; --line: #2d3339;
    --train: #74a9ff; --val: #ffae63; --test: #56cfa8; --right: #45c79c; --wrong: #ff7a63;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "PingFang SC", "Microsoft YaHei",
    "Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", sans-serif;
}
main { max-width: 1160px; margin: 0 auto; padding: 32px 20px 48px; }
header p { margin: 2px 0 0; color: var(--soft); }
h1 { margin: 0; font-size: 30px; line-height: 1.2; letter-spacing: -.01em; }
h2 { margin: 0 0 12px; font-size: 19px; }
h3 { margin: 0 0 6px; font-size: 14px; }
h2 span, h3 span, dt span, p span { color: var(--soft); font-weight: 400; }
section h3:not(figure h3) { margin-top: 20px; }
section, .tiles div {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px; min-width: 0;
}
section { margin-top: 20px; padding: 20px 22px; }
section > p { margin: 0 0 12px; color: var(--soft); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); column-gap: 20px; }
.name { overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(136px, 1fr)); gap: 12px; margin: 22px 0 0; }
.tiles div { padding: 12px 16px; }
.tiles div:first-child { border-left: 4px solid var(--train); }
dt { font-size: 12px; color: var(--soft); }
dt span { display: block; }
dd { margin: 2px 0 0; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
figure { margin: 0; min-width: 0; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 26px 30px; }
svg { display: block; width: 100%; height: auto; overflow: visible; font-family: inherit; }
svg text { fill: var(--soft); }
.tick { font-size: 12px; font-variant-numeric: tabular-nums; }
.y.tick { text-anchor: end; }
.x.tick { text-anchor: middle; }
.grid { stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; }
path { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; vector-effect: non-scaling-stroke; }
path.raw { opacity: .3; stroke-width: 1; }
path.train { stroke: var(--train); }
path.val { stroke: var(--val); }
path.test { stroke: var(--test); }
circle.train { fill: var(--train); }
circle.val { fill: var(--val); }
circle.test { fill: var(--test); }
svg .broken { fill: var(--wrong); font-size: 18px; text-anchor: middle; font-weight: 700; }
figcaption { font-size: 13px; color: var(--soft); font-variant-numeric: tabular-nums; }
.key { display: inline-block; margin-right: 14px; }
.key b { color: var(--ink); }
.key::before {
  content: ""; display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px;
  vertical-align: middle; background: currentColor;
}
.key.train::before { background: var(--train); }
.key.val::before { background: var(--val); }
.key.test::before { background: var(--test); }
.wide { overflow-x: auto; }
.tall { max-height: 560px; overflow-y: auto; }
.frame { fill: none; stroke: var(--line); }
rect.right { fill: var(--right); }
rect.wrong { fill: var(--wrong); }
svg .row { text-anchor: end; }
svg .upright { text-anchor: end; writing-mode: vertical-rl; }
svg .column, svg .count { text-anchor: middle; }
svg .count { fill: var(--ink); font-variant-numeric: tabular-nums; pointer-events: none; }
img.matrix { width: 100%; max-width: 800px; border: 1px solid var(--line); }
table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
th { font-weight: 600; white-space: nowrap; }
thead th { position: sticky; top: 0; background: var(--card); }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.pairs th { color: var(--soft); font-weight: 400; }
.pairs td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.classes td { vertical-align: middle; }
.classes td:first-child, .classes td:last-child { min-width: 6em; }
.bar { display: block; width: 120px; height: 5px; border-radius: 3px; background: var(--line); overflow: hidden; }
.bar::before {
  content: ""; display: block; height: 100%; width: calc(100% * var(--share)); background: var(--right);
}
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(132px, 1fr)); gap: 18px 14px; }
.pictures img {
  display: block; width: 100%; aspect-ratio: 1; object-fit: contain; border-radius: 8px; background: var(--paper);
}
.pixels { image-rendering: pixelated; }
.pictures figcaption { margin-top: 6px; line-height: 1.35; overflow-wrap: anywhere; }
.pictures b { color: var(--ink); }
.pictures data { white-space: nowrap; }
.pictures small {
  display: block; font-size: 11px; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; opacity: .8;
}
.yes { color: var(--right); font-weight: 700; }
.no { color: var(--wrong); font-weight: 700; }
pre {
  margin: 0; columns: 260px; column-gap: 32px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, "Noto Sans Mono CJK SC", monospace;
}
footer { margin-top: 20px; color: var(--soft); font-size: 13px; }
@media (max-width: 720px) {
  main { padding: 20px 12px 32px; }
  section { padding: 16px 14px; }
  h1 { font-size: 24px; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; }
  .tiles div:first-child:nth-last-child(odd) { grid-column: span 2; }
  dd { font-size: 19px; }
  .charts { grid-template-columns: minmax(0, 1fr); }
  .tick { font-size: 19px; }
  .bar { width: 60px; }
  th, td { padding-right: 12px; }
  th:last-child, td:last-child { padding-right: 0; }
  .classes td:first-child, .classes td:last-child { min-width: 4.5em; }
  .pictures { grid-template-columns: repeat(auto-fill, minmax(96px, 1fr)); }
}
@media print { .tall { max-height: none; } section { break-inside: avoid; } }
"""
