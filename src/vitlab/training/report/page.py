"""A run -> report.html: one file that needs nothing else, neither network nor script, and can be mailed.

Curves and tables are SVG and HTML text, so the reader's own fonts draw every language; the page is also valid XML.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.explain.scale import HIGHEST, LOWEST
from vitlab.language import language
from vitlab.parsing import flat, parse_toml
from vitlab.training.report.background import Smoothing, rungs_table, smoothing_sentence, start_sentence
from vitlab.training.report.classes import class_tables
from vitlab.training.report.curves import charts
from vitlab.training.report.html import (
    GalleryItem,
    both,
    escaped,
    gallery,
    name_html,
    number,
    section,
    table_of,
    translated,
)
from vitlab.training.report.verdict import Evidence, verdict
from vitlab.version import __version__

REPORT = "report.html"
LEARNED = ("top-1", "mAP", "R2", "mIoU", "AP")  # judged by labels that were learned, not by k-NN, zero-shot or recall
_OF_STEPS = ("epochs", "images_per_second")  # a linear probe has none
TILES = {  # key of result.json -> what it is called
    "top1": ("Top-1 accuracy", "准确率"),
    "top5": ("Top-5 accuracy", "前五准确率"),
    "map": ("Mean average precision", "平均精度均值"),
    "miou": ("Mean IoU", "平均交并比"),
    "pixel_accuracy": ("Pixels that are right", "像素准确率"),
    "ap": ("Average precision", "平均精度"),
    "ap50": ("Average precision at IoU 0.5", "IoU 0.5 的平均精度"),
    "pq": ("Panoptic quality", "全景质量"),
    "f1_micro": ("F1 (micro)", "F1（微平均）"),
    "f1_macro": ("F1 (macro)", "F1（宏平均）"),
    "mae": ("Mean absolute error", "平均绝对误差"),
    "rmse": ("Root mean squared error", "均方根误差"),
    "r2": ("R2", "决定系数"),
    "loss": ("Loss", "损失"),
    "params": ("Parameters", "参数量"),
    "epochs": ("Epochs", "轮数"),
    "seconds": ("Training time", "训练用时"),
    "images_per_second": ("Images per second", "每秒图像数"),
}
CHINESE_KEYS = {key: chinese for key, (_, chinese) in TILES.items()} | {  # of all numbers
    "split": "评估用的划分",
    "objective": "训练目标",
    "judged_by": "评判指标",
    "baseline": "最常见类别的准确率",
    "majority": "最常见类别的占比",
    "ece": "校准误差",
    "interval": "95 % 区间",
    "images": "图片数",
    "val_top1": "验证准确率",
    "val_map": "验证平均精度均值",
    "val_r2": "验证决定系数",
    "rung": "选用的方法",
    "best_epoch": "最好的一轮",
    "steps": "步数",
    "stopped_early": "提前停止",
    "seed": "随机种子",
    "unreadable": "读不了的图片",
    "start.name": "起始权重",
    "start.why": "选择它的依据",
    "start.licence": "起始权重的许可证",
    "start.expected": "预计秒数",
    "system": "系统",
    "threads": "线程数",
}
KINDS = {"note": "说明", "skipped": "跳过", "rung": "方法", "doctor": "诊断", "resume": "继续"}  # of events, in Chinese


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
    successes: list[GalleryItem] = field(default_factory=list)  # typical ones
    suspects: list[GalleryItem] = field(default_factory=list)  # `truth` is the given label
    evidence: Evidence = field(default_factory=Evidence)
    smoothing: Smoothing | None = None  # of the model that was kept; None: it was not trained step by step
    confidence: float | None = None  # mean over the evaluated images
    heat: str = ""  # the method that drew the heat maps


def write_report(folder: Path, report: RunReport) -> Path:
    """Write folder/report.html."""
    from vitlab.checkpoints.native import write_text

    folder = Path(folder)
    log, recipe_text, result, classes = report.log, report.recipe_text, report.result, report.classes
    confusion = report.confusion
    assert confusion is None or confusion.shape == (len(classes), len(classes)), (np.shape(confusion), len(classes))
    background = [
        rungs_table(result),
        start_sentence(result),
        smoothing_sentence(report.smoothing, report.confidence, result.get("top1")),
    ]
    header, tiles = _header(folder.resolve().name, log, recipe_text, result, len(classes))
    samples = both("Images the model was not trained on.", "模型没有训练过的图片。")
    body = "\n".join(
        [
            header,
            section("Verdict", "结论", verdict(result, report.evidence)),
            section("Worst mistakes", "最严重的错误", gallery(_worst_first(report), _mistakes_caption(report))),
            section("Typical successes", "典型的正确回答", gallery(report.successes, _successes_caption(report))),
            section("Labels that may be wrong", "可能有误的标签", gallery(report.suspects, _suspects_caption(report))),
            section("How it was made", "怎样得到的", "".join(background)),
            tiles,
            section("Curves", "曲线", charts(log, labels=result.get("judged_by", "top-1") in LEARNED)),
            "" if confusion is None or not confusion.any() else class_tables(confusion, classes),
            section("Sample predictions", "预测示例", gallery(report.samples, samples)),
            section("Events", "事件", _events(log)),
            section("All numbers", "全部数值", table_of(result, CHINESE_KEYS)),
            section("Recipe", "配方", f"<pre>{escaped(recipe_text.strip())}</pre>" if recipe_text.strip() else ""),
            section("Environment", "环境", table_of(report.environment, CHINESE_KEYS)),
        ]
    )
    path = folder / REPORT
    write_text(path, html_document(folder.resolve().name, body))
    return path


def html_document(title: str, body: str, style: str = "") -> str:
    """A page that needs nothing else, in the style of all reports; `style`: CSS of its own."""
    css, version = f"\n{_asset('page.css')}{style}", escaped(__version__)
    return _asset("page.html").format(title=escaped(title), style=css, body=body, version=version, **_language_marks())


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _language_marks() -> dict[str, str]:
    """The page opens in the language of the terminal that the run was started from."""
    chinese = language() == "zh"
    return {
        "lang": "zh-CN" if chinese else "en",
        "en": "" if chinese else ' checked="checked"',
        "zh": ' checked="checked"' if chinese else "",
    }


def _worst_first(report: RunReport) -> list[GalleryItem]:
    """Of several labels and of numbers they come by their loss."""
    if "map" in report.result:
        return report.mistakes
    return sorted(report.mistakes, key=lambda item: -(item.confidence or 0.0))


def _mistakes_caption(report: RunReport) -> str:
    english, chinese = (
        "Wrong, and most sure of it, first: given label → <b>answer</b>.",
        "答错而又最有把握的在前：给定标签 → <b>回答</b>。",
    )
    if "mae" in report.result:
        english, chinese = (
            "The largest errors first: true → <b>predicted</b>.",
            "误差最大的在前：真值 → <b>预测值</b>。",
        )
    if "map" in report.result:
        english, chinese = (
            "The largest losses first: given labels → <b>answer</b>.",
            "损失最大的在前：给定标签 → <b>回答</b>。",
        )
    if report.result.keys() & {"miou", "ap"}:
        english, chinese = (
            "The worst first: what is marked, and beside it what the model says.",
            "最差的在前：左边是标注，右边是模型的回答。",
        )
    if report.heat:
        what, chinese_what = "spoke for the answer", "支持这个回答的部分"
        if "mae" in report.result:
            what, chinese_what = "raised the number", "使数值升高的部分"
        elif "map" in report.result:
            what, chinese_what = "spoke for the label below it", "支持图下所写标签的部分"
        english += f" Bright is what {what} ({escaped(report.heat)}; colours span each map's "
        english += f"{LOWEST}st to {HIGHEST}th percentile)."
        chinese += f"亮处是{chinese_what}（{escaped(report.heat)}；颜色从每张图的第 {LOWEST} 百分位"
        chinese += f"到第 {HIGHEST} 百分位）。"
    return both(english, chinese)


def _successes_caption(report: RunReport) -> str:
    if "mae" in report.result:
        return both(
            "From the better half of the answers, low numbers first: true → <b>predicted</b>.",
            "取自误差较小的一半，数值小的在前：真值 → <b>预测值</b>。",
        )
    english = "Right, and as sure of it as it is of most images of the class. "
    english += "Is it the object that it looks at, or the background?"
    return both(english, "答对，且把握与该类多数图片相当。它看的是物体，还是背景？")


def _suspects_caption(report: RunReport) -> str:
    evidence = report.evidence
    return both(
        f"Given label → <b>what the model takes it for</b>. {evidence.suspects:,} of {evidence.labels:,} labels are "
        "contradicted by a model that was not trained on the image, as surely as it is of that class elsewhere. The "
        "model may be wrong as well: look before you change a label.",
        f"给定标签 → <b>模型的判断</b>。{evidence.labels:,} 个标签中有 {evidence.suspects:,} 个"
        "与没有训练过该图片的模型相矛盾，而模型的把握不低于它对该类其他图片的把握。错的也可能是模型：修改标签之前请先看图。",
    )


def _header(
    name: str, log: list[dict[str, Any]], recipe_text: str, result: dict[str, Any], classes: int
) -> tuple[str, str]:
    """Title, and the tiles of the main numbers."""
    try:
        recipe = flat(parse_toml(recipe_text))
    except ValueError:
        recipe = {}
    weights = recipe.get("model.init_from") or recipe.get("model.name")  # a name is not used where weights are given
    about = [name_html(value) for value in (weights, recipe.get("data.source")) if value]
    if "seed" in result:
        about.append(f"{both('seed', '随机种子')} {number('seed', result['seed'])}")
    if log and log[-1].get("time"):
        ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(log[-1]["time"]))
        about.append(f'<time datetime="{ended[:10]}T{ended[11:16]}Z">{ended}</time>')
    line = " · ".join(part for part in about if part)
    names, judged = dict(TILES), str(result.get("judged_by", "top-1"))
    if judged not in LEARNED:  # k-NN, zero-shot or recall
        names["top1"] = (escaped(judged), escaped(judged))
        name_of_loss = escaped(judged.removesuffix(" top-1"))
        names["loss"] = (f"Loss ({name_of_loss})", f"损失（{name_of_loss}）")
    tiles = [
        f"<div><dt>{both(title, chinese)}</dt><dd>{number(key, result[key])}</dd></div>"
        for key, (title, chinese) in names.items()
        if key in result and not (key == "top5" and classes <= 10) and not (key in _OF_STEPS and not result[key])
    ]
    header = f"<header>\n<h1>{name_html(name)}</h1>\n<p>{line}</p>\n</header>"
    return header, f'<dl class="tiles">{"".join(tiles)}</dl>'


def _events(log: list[dict[str, Any]], most: int = 40) -> str:
    """Notes, skipped images and other events that no curve shows."""
    events = [e for e in log if e["kind"] not in ("train", "val", "test", "start", "result")]
    rows = []
    for event in events[:most]:
        rest = {k: v for k, v in event.items() if k not in ("kind", "step", "time", "text", "message")}
        parts = [translated(event[key]) for key in ("text", "message") if key in event]
        parts += [escaped(f"{key}: {value}") for key, value in flat(rest).items()]
        kind, step = both(escaped(event["kind"]), KINDS.get(event["kind"], escaped(event["kind"]))), event["step"]
        rows.append(f'<tr><td>{step}</td><td>{kind}</td><td class="name">{"; ".join(parts)}</td></tr>')
    if len(events) > most:
        more = both(f"and {len(events) - most} more, in log.jsonl", f"还有 {len(events) - most} 条，见 log.jsonl")
        rows.append(f"<tr><td></td><td></td><td>{more}</td></tr>")
    head = f"<tr><th>{both('step', '步')}</th><th>{both('kind', '类型')}</th><th>{both('what', '内容')}</th></tr>"
    return f'<div class="wide"><table class="events">{head}{"".join(rows)}</table></div>' if rows else ""
