"""The first two sentences of a report: how good the model is, against what, and how sure; and what to do next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitlab.training.report.html import both, escaped, name_html, number, percent

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


def next_step(result: Mapping[str, Any], evidence: Evidence) -> str:
    """start, clean, longer, label, measure or use."""
    low, high = result["interval"]
    if low <= result["majority"]:
        return "start"
    if evidence.suspects >= SEVERAL and evidence.suspects >= CLEAN * evidence.labels:
        return "clean"
    nearly_all = result["top1"] >= NEARLY_ALL
    if not nearly_all and (result.get("stopped_early") or _no_time(result) or evidence.rising):
        return "longer"
    curve = result.get("learning_curve")
    if not nearly_all and curve is not None:
        last = curve["accuracies"][-1]
        if curve["forecast"] - last >= POINT and curve["low"] > last:
            return "label"
    return "measure" if high - low > WIDE else "use"


def _no_time(result: Mapping[str, Any]) -> bool:
    """Whether a rung of the ladder was left out for want of time."""
    return any(rung["for_time"] for rung in result.get("left_out") or [])


def verdict(result: Mapping[str, Any], evidence: Evidence) -> str:
    """HTML; empty where the run has no accuracy with an interval."""
    if not {"interval", "majority", "images", "top1"} <= result.keys():
        kinds = {"recall": _retrieval, "map": _several_labels, "mae": _regression}
        return next((words(result) for key, words in kinds.items() if key in result), "")
    advice = _ADVICE[next_step(result, evidence)](result, evidence)
    sentences = both(*(f"{good} {what}" for good, what in zip(_how_good(result, evidence), advice, strict=True)))
    return f'<p class="verdict">{sentences}</p>{_scale(result)}{_small_print(result)}'


def _how_good(result: Mapping[str, Any], evidence: Evidence) -> tuple[str, str]:
    english, chinese = SPLITS.get(result.get("split", "val"), SPLITS["val"])
    top1, (low, high), images = number("top1", result["top1"]), result["interval"], f"{result['images']:,}"
    usual = None if evidence.usual is None else name_html(evidence.usual)
    baseline = percent(result["majority"])
    judged = str(result.get("judged_by", "top-1"))
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


def _start(result: Mapping[str, Any], evidence: Evidence) -> tuple[str, str]:
    return (
        "That is not surely better than not looking at the images: <b>label more images</b>, and check the labels "
        "below, before you rely on it.",
        "这还不能说明它比不看图片更好：先<b>多标一些图片</b>，并检查下面的标签，再考虑使用。",
    )


def _clean(result: Mapping[str, Any], evidence: Evidence) -> tuple[str, str]:
    share = percent(evidence.suspects / evidence.labels)
    return (
        f"Next, <b>check the labels</b>: {evidence.suspects:,} of {evidence.labels:,} ({share}) may be wrong, as shown "
        "below; correct them and train again.",
        f"下一步<b>检查标签</b>：{evidence.labels:,} 个标签中有 {evidence.suspects:,} 个（{share}）可能有误，"
        "见下文；改正后再训练一次。",
    )


def _longer(result: Mapping[str, Any], evidence: Evidence) -> tuple[str, str]:
    if result.get("stopped_early"):
        why, chinese = "the time was up before training had ended", "时间用完时训练还没有结束"
    elif _no_time(result):
        why, chinese = "there was no time left to tune more of the network", "没有时间微调更多的网络层"
    else:
        why, chinese = "validation accuracy was still rising at the end", "训练结束时验证准确率还在上升"
    return f"Next, <b>train longer</b>: {why}.", f"下一步<b>训练更久</b>：{chinese}。"


def _label(result: Mapping[str, Any], evidence: Evidence) -> tuple[str, str]:
    gain, span, labels = _gain(result["learning_curve"])
    return (
        f"Next, <b>label more images</b>: twice the labels ({labels}) would bring about {gain} points ({span[0]} to "
        f"{span[1]}).",
        f"下一步<b>多标一些图片</b>：标签增加一倍（共 {labels} 个）大约能提高 {gain} 个百分点"
        f"（{span[0]} 到 {span[1]}）。",
    )


def _measure(result: Mapping[str, Any], evidence: Evidence) -> tuple[str, str]:
    low, high = result["interval"]
    images = f"{result['images']:,}"
    return (
        f"It can be used, but {images} images leave open whether it is right on {percent(low, 0)} or on "
        f"{percent(high, 0)}: <b>label more images to measure it with</b>.",
        f"可以使用，但只有 {images} 张图片，无法确定它能答对 {percent(low, 0)} 还是 {percent(high, 0)}："
        "<b>多标一些图片来评估</b>。",
    )


def _use(result: Mapping[str, Any], evidence: Evidence) -> tuple[str, str]:
    command = f"<code>vitlab predict {escaped(evidence.folder)}/best FOLDER</code>"
    curve = result.get("learning_curve")
    more = chinese = ""
    if curve is not None:
        gain, _, labels = _gain(curve)
        more = f" (twice the labels, {labels}, would bring about {gain} points)"
        chinese = f"（标签增加一倍，共 {labels} 个，大约只提高 {gain} 个百分点）"
    return f"<b>It is ready to use</b>{more}: {command}.", f"<b>可以使用</b>{chinese}：{command}。"


_ADVICE = {"start": _start, "clean": _clean, "longer": _longer, "label": _label, "measure": _measure, "use": _use}


def _gain(curve: Mapping[str, Any]) -> tuple[str, tuple[str, str], str]:
    """Points that twice the labels would bring, their interval, and how many labels that is."""
    last = curve["accuracies"][-1]
    gain, low, high = (f"{100 * (curve[key] - last):+.1f}" for key in ("forecast", "low", "high"))
    return gain, (low, high), f"{curve['forecast_labels']:,}"


def _scale(result: Mapping[str, Any]) -> str:
    """The accuracy with its interval on a line from 0 to 100 %, and a tick where the most frequent answer stands."""
    low, high = result["interval"]
    place = lambda share: f"{100 * share:.2f}%"
    return (
        f'<div class="scale" role="img" aria-label="{percent(result["top1"])}, {percent(low)} – {percent(high)}">'
        f'<i class="band" style="left:{place(low)};width:{place(high - low)}"></i>'
        f'<i class="dot" style="left:{place(result["top1"])}"></i>'
        f'<i class="tick-mark" style="left:{place(result["majority"])}"></i>'
        f'<small class="floor" style="left:{place(result["majority"])}">{both("most frequent class", "最常见的类别")} '
        f"{percent(result['majority'], 0)}</small></div>"
    )


def _small_print(result: Mapping[str, Any]) -> str:
    if result.get("split") != "val":
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


def _several_labels(result: Mapping[str, Any]) -> str:
    (english, chinese), images = SPLITS.get(result.get("split", "val"), SPLITS["val"]), f"{result['images']:,}"
    precision, micro, macro = (percent(result[key]) for key in ("map", "f1_micro", "f1_macro"))
    low, high = map(percent, result["interval"])
    sentences = both(
        f"The mean average precision over the labels is <b>{precision}</b> on {images} {english} images (95 % interval "
        f"{low} to {high}). With the thresholds chosen on validation images, F1 is {micro} over all answers and "
        f"{macro} as the mean over labels.",
        f"在 {images} 张{chinese}图片上，各标签的平均精度均值（mAP）为 <b>{precision}</b>"
        f"（95 % 置信区间 {low} 到 {high}）。"
        f"用验证图片选定的阈值，全部回答的 F1 为 {micro}，各标签 F1 的平均值为 {macro}。",
    )
    return f'<p class="verdict">{sentences}</p>'


def _regression(result: Mapping[str, Any]) -> str:
    (english, chinese), images = SPLITS.get(result.get("split", "val"), SPLITS["val"]), f"{result['images']:,}"
    off, r2, (low, high) = f"{result['mae']:.4g}", result["r2"], result["interval"]
    share = "How much better than the mean that is, these images do not tell: they all have the same number."
    share_chinese = "这些图片的数值都相同，无法判断它比总是回答平均值好多少。"
    if not math.isnan(r2):
        share = (
            f"Its R2 is {r2:.3f} (95 % interval {low:.3f} to {high:.3f}): 1 is perfect, and always answering with the "
        )
        share += "mean gives 0."
        share_chinese = (
            f"R2 为 {r2:.3f}（95 % 置信区间 {low:.3f} 到 {high:.3f}）：1 表示完全准确，总是回答平均值则为 0。"
        )
    sentences = both(
        f"On {images} {english} images the prediction is off by <b>{off}</b> on average. {share}",
        f"在 {images} 张{chinese}图片上，预测平均偏差 <b>{off}</b>。{share_chinese}",
    )
    return f'<p class="verdict">{sentences}</p>'
