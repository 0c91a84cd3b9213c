"""The first two sentences of a report: how good the model is, against what, and how sure; and what to do next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitlab.training.report.html import both, escaped, name_html, number, percent
from vitlab.training.uncertainty import LearningCurve

CLEAN = 0.02  # share of labels that may be wrong from which on cleaning comes first
SEVERAL = 3  # labels that may be wrong; one or two may be chance
WIDE = 0.1  # an interval that leaves open what the model is worth
NEARLY_ALL = 0.995  # right: neither more training nor more labels can add much
POINT = 0.01  # gain in accuracy that is worth the labelling
SPLITS = {"val": ("validation", "验证"), "test": ("test", "测试")}


@dataclass(frozen=True)
class Evidence:
    """What a verdict rests on, beside the numbers of result.json."""

    folder: str = ""  # of the run
    usual: str | None = None  # the most frequent class of the training images
    labels: int = 0  # that were examined
    suspects: int = 0  # of these, labels that may be wrong
    rising: bool = False  # validation accuracy was still rising when training ended


@dataclass(frozen=True)
class AccuracyResult:
    """What result.json says of a classifier."""

    top1: float
    low: float  # 95 % interval
    high: float
    images: int
    majority: float  # accuracy of always answering the most frequent class
    split: str = "val"
    judged_by: str = "top-1"
    stopped_early: bool = False
    left_out_for_time: bool = False  # a rung of the ladder
    curve: LearningCurve | None = None

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> AccuracyResult:
        (low, high), curve = result["interval"], result.get("learning_curve")
        names = ("top1", "images", "majority", "split", "judged_by", "stopped_early")
        return cls(
            **{name: result[name] for name in names if name in result},
            low=low,
            high=high,
            left_out_for_time=any(rung["for_time"] for rung in result.get("left_out") or []),
            curve=None if curve is None else LearningCurve(**curve),
        )


def next_step(result: AccuracyResult, evidence: Evidence) -> str:
    """start, clean, longer, label, measure or use."""
    if result.low <= result.majority:
        return "start"
    if evidence.suspects >= SEVERAL and evidence.suspects >= CLEAN * evidence.labels:
        return "clean"
    nearly_all, curve = result.top1 >= NEARLY_ALL, result.curve
    if not nearly_all and (result.stopped_early or result.left_out_for_time or evidence.rising):
        return "longer"
    if not nearly_all and curve is not None and curve.gain >= POINT and curve.low > curve.accuracies[-1]:
        return "label"
    return "measure" if result.high - result.low > WIDE else "use"


def verdict(result: Mapping[str, Any], evidence: Evidence) -> str:
    """HTML; empty where the run has no accuracy with an interval."""
    if not {"interval", "majority", "images", "top1"} <= result.keys():
        if "recall" in result:
            return _retrieval(result)
        kinds = {"map": _several_labels, "mae": _regression}
        return next((words(result, evidence) for key, words in kinds.items() if key in result), "")
    measured = AccuracyResult.of(result)
    advice = _ADVICE[next_step(measured, evidence)](measured, evidence)
    sentences = both(*(f"{good} {what}" for good, what in zip(_how_good(measured, evidence), advice, strict=True)))
    return f'<p class="verdict">{sentences}</p>{_scale(measured)}{_small_print(measured)}'


def _how_good(result: AccuracyResult, evidence: Evidence) -> tuple[str, str]:
    english, chinese = SPLITS[result.split]
    top1, low, high, images = number("top1", result.top1), result.low, result.high, f"{result.images:,}"
    usual = None if evidence.usual is None else name_html(evidence.usual)
    baseline, judged = percent(result.majority), result.judged_by
    by, by_chinese = (
        ("It is", "模型") if judged == "top-1" else (f"By {escaped(judged)} it is", f"按 {escaped(judged)}，模型")
    )
    always = f"always answering {usual}" if usual else "always giving the most frequent answer"
    always_chinese = f"一律回答 {usual} " if usual else "一律回答最常见的类别"
    return (
        f"{by} right on <b>{top1}</b> of {images} {english} images (95 % interval {percent(low)} to {percent(high)}); "
        f"{always} would be right on {baseline}.",
        f"{by_chinese}在 {images} 张{chinese}图片上答对 <b>{top1}</b>"
        f"（95 % 置信区间 {percent(low)} 到 {percent(high)}）；{always_chinese}能答对 {baseline}。",
    )


def _start(result: AccuracyResult, evidence: Evidence) -> tuple[str, str]:
    return (
        "That is not surely better than not looking at the images: <b>label more images</b>, and check the labels "
        "below, before you rely on it.",
        "这还不能说明它比不看图片更好：先<b>多标一些图片</b>，并检查下面的标签，再考虑使用。",
    )


def _clean(result: AccuracyResult, evidence: Evidence) -> tuple[str, str]:
    share = percent(evidence.suspects / evidence.labels)
    return (
        f"Next, <b>check the labels</b>: {evidence.suspects:,} of {evidence.labels:,} ({share}) may be wrong, as shown "
        "below; correct them and train again.",
        f"下一步<b>检查标签</b>：{evidence.labels:,} 个标签中有 {evidence.suspects:,} 个（{share}）可能有误，"
        "见下文；改正后再训练一次。",
    )


def _longer(result: AccuracyResult, evidence: Evidence) -> tuple[str, str]:
    if result.stopped_early:
        why, chinese = "the time was up before training had ended", "时间用完时训练还没有结束"
    elif result.left_out_for_time:
        why, chinese = "there was no time left to tune more of the network", "没有时间微调更多的网络层"
    else:
        why, chinese = "validation accuracy was still rising at the end", "训练结束时验证准确率还在上升"
    return f"Next, <b>train longer</b>: {why}.", f"下一步<b>训练更久</b>：{chinese}。"


def _label(result: AccuracyResult, evidence: Evidence) -> tuple[str, str]:
    assert result.curve is not None  # next_step
    gain, span, labels = _gain(result.curve)
    return (
        f"Next, <b>label more images</b>: twice the labels ({labels}) would bring about {gain} points ({span[0]} to "
        f"{span[1]}).",
        f"下一步<b>多标一些图片</b>：标签增加一倍（共 {labels} 个）大约能提高 {gain} 个百分点"
        f"（{span[0]} 到 {span[1]}）。",
    )


def _measure(result: AccuracyResult, evidence: Evidence) -> tuple[str, str]:
    low, high, images = result.low, result.high, f"{result.images:,}"
    return (
        f"It can be used, but {images} images leave open whether it is right on {percent(low, 0)} or on "
        f"{percent(high, 0)}: <b>label more images to measure it with</b>.",
        f"可以使用，但只有 {images} 张图片，无法确定它能答对 {percent(low, 0)} 还是 {percent(high, 0)}："
        "<b>多标一些图片来评估</b>。",
    )


def _use(result: AccuracyResult, evidence: Evidence) -> tuple[str, str]:
    command = f"<code>vitlab predict {escaped(evidence.folder)}/best FOLDER</code>"
    more = chinese = ""
    if result.curve is not None:
        gain, _, labels = _gain(result.curve)
        more = f" (twice the labels, {labels}, would bring about {gain} points)"
        chinese = f"（标签增加一倍，共 {labels} 个，大约只提高 {gain} 个百分点）"
    return f"<b>It is ready to use</b>{more}: {command}.", f"<b>可以使用</b>{chinese}：{command}。"


_ADVICE = {"start": _start, "clean": _clean, "longer": _longer, "label": _label, "measure": _measure, "use": _use}


def _gain(curve: LearningCurve) -> tuple[str, tuple[str, str], str]:
    """Points that twice the labels would bring, their interval, and how many labels that is."""
    last = curve.accuracies[-1]
    gain, low, high = (f"{100 * (value - last):+.1f}" for value in (curve.forecast, curve.low, curve.high))
    return gain, (low, high), f"{curve.forecast_labels:,}"


def _scale(result: AccuracyResult) -> str:
    """The accuracy with its interval on a line from 0 to 100 %, and a tick where the most frequent answer stands."""
    low, high = result.low, result.high
    place = lambda share: f"{100 * share:.2f}%"
    return (
        f'<div class="scale" role="img" aria-label="{percent(result.top1)}, {percent(low)} – {percent(high)}">'
        f'<i class="band" style="left:{place(low)};width:{place(high - low)}"></i>'
        f'<i class="dot" style="left:{place(result.top1)}"></i>'
        f'<i class="tick-mark" style="left:{place(result.majority)}"></i>'
        f'<small class="floor" style="left:{place(result.majority)}">{both("most frequent class", "最常见的类别")} '
        f"{percent(result.majority, 0)}</small></div>"
    )


def _small_print(result: AccuracyResult) -> str:
    if result.split != "val":
        return ""
    return (
        '<p class="small">'
        + both(
            "The model was also chosen by these validation images, so expect a little less on new ones; a "
            "<code>test/</code> folder measures that.",
            "模型也是用这些验证图片选出来的，因此在新图片上会略低；加一个 <code>test/</code> 文件夹就能测出来。",
        )
        + "</p>"
    )


def _retrieval(result: Mapping[str, Any]) -> str:
    recall, chance = (result[key]["image_to_text"]["1"] for key in ("recall", "chance"))
    return (
        '<p class="verdict">'
        + both(
            f"For <b>{percent(recall, 2)}</b> of the images the nearest caption is one of their own; guessing would "
            f"find it for {percent(chance, 2)}.",
            f"<b>{percent(recall, 2)}</b> 的图片，最近的说明文字就是它自己的；随机猜测只有 {percent(chance, 2)}。",
        )
        + "</p>"
    )


def _several_labels(result: Mapping[str, Any], evidence: Evidence) -> str:
    (english, chinese), images = SPLITS[result["split"]], f"{result['images']:,}"
    precision, micro, macro = (percent(result[key]) for key in ("map", "f1_micro", "f1_macro"))
    (low, high), chance = map(percent, result["interval"]), percent(result["baseline"])
    advice = _target_advice(result, evidence, result["map"], result["baseline"], (low, high))
    sentences = both(
        f"The mean average precision over the labels is <b>{precision}</b> on {images} {english} images (95 % interval "
        f"{low} to {high}); a random order would have {chance}. With the thresholds chosen on validation images, F1 is "
        f"{micro} over all answers and {macro} as the mean over labels. {advice[0]}",
        f"在 {images} 张{chinese}图片上，各标签的平均精度均值（mAP）为 <b>{precision}</b>"
        f"（95 % 置信区间 {low} 到 {high}）；随机排序为 {chance}。"
        f"用验证图片选定的阈值，全部回答的 F1 为 {micro}，各标签 F1 的平均值为 {macro}。{advice[1]}",
    )
    return f'<p class="verdict">{sentences}</p>'


def _regression(result: Mapping[str, Any], evidence: Evidence) -> str:
    (english, chinese), images = SPLITS[result["split"]], f"{result['images']:,}"
    off, r2, (low, high) = f"{result['mae']:.4g}", result["r2"], result["interval"]
    share = "How much better than the mean that is, these images do not tell: they all have the same number."
    share_chinese = "这些图片的数值都相同，无法判断它比总是回答平均值好多少。"
    if not math.isnan(r2):
        share = f"Its R2 is {r2:.3f} (95 % interval {low:.3f} to {high:.3f}): 1 is perfect, and always answering with "
        share += "the mean gives 0."
        share_chinese = f"R2 为 {r2:.3f}（95 % 置信区间 {low:.3f} 到 {high:.3f}）：1 表示完全准确，"
        share_chinese += "总是回答平均值则为 0。"
    advice = _target_advice(result, evidence, r2, 0.0, (f"{low:.2f}", f"{high:.2f}"))
    sentences = both(
        f"On {images} {english} images the prediction is off by <b>{off}</b> on average. {share} {advice[0]}",
        f"在 {images} 张{chinese}图片上，预测平均偏差 <b>{off}</b>。{share_chinese}{advice[1]}",
    )
    return f'<p class="verdict">{sentences}</p>'


def _target_advice(
    result: Mapping[str, Any], evidence: Evidence, value: float, floor: float, shown: tuple[str, str]
) -> tuple[str, str]:
    """What to do next with a model of several labels or of a number; `floor`: what needs no look at the images."""
    measured = AccuracyResult.of({**result, "top1": value, "majority": floor})
    step, metric = "measure" if math.isnan(value) else next_step(measured, evidence), escaped(result["judged_by"])
    if step == "start":
        return (
            "That is not surely better than not looking at the images: <b>label more images</b>, and check the table, "
            "before you rely on it.",
            "这还不能说明它比不看图片更好：先<b>多标一些图片</b>，并检查表格，再考虑使用。",
        )
    if step == "measure":
        low, high = shown
        question, chinese = f"whether its {metric} is {low} or {high}", f" {metric} 是 {low} 还是 {high}"
        if math.isnan(value):
            question, chinese = "how good it is", "它有多好"
        return (
            f"These images leave open {question}: <b>label more images to measure it with</b>.",
            f"这些图片无法确定{chinese}：<b>多标一些图片来评估</b>。",
        )
    return _ADVICE[step](measured, evidence)
