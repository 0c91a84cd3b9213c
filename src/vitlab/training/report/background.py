"""How a model was made, in words: where it started, what was tried, and what label smoothing does to its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitlab.training.report.html import both, duration, escaped, name_html, number, percent

RUNGS = {  # name -> in Chinese
    "knn": "k 近邻",
    "probe": "线性探测",
    "mirrored": "加上镜像图片的线性探测",
    "lora": "LoRA",
    "whole": "整个网络",
    "tuned": "按你的设置微调",
    "scratch": "从零训练的网络",
}


@dataclass(frozen=True)
class Smoothing:
    """Targets of label smoothing (arXiv:1512.00567): 1 - eps + eps / K for the label, eps / K for every other class."""

    eps: float
    classes: int
    mixed: bool = False  # by mixup or CutMix, whose targets are softer still

    @property
    def confidence(self) -> float:
        """Probability of the label that a perfect fit gives."""
        return 1 - self.eps + self.eps / self.classes

    @property
    def floor(self) -> float:
        """The least loss that can be reached: the entropy of the targets."""
        other = self.eps / self.classes
        rest = (self.classes - 1) * other * math.log(other) if other else 0.0
        return -self.confidence * math.log(self.confidence) - rest


def rungs_table(result: Mapping[str, Any]) -> str:
    """What was tried on the validation images, and which was kept."""
    rungs: list[dict[str, Any]] = result.get("rungs") or []
    if not rungs:
        return ""
    rows = []
    for rung in rungs:
        figure = next(key for key in rung if key.startswith("val_"))  # val_top1, val_map or val_r2
        low, high = rung.get("interval", (None, None))
        shown = percent if figure != "val_r2" else "{:.3f}".format
        span = "" if low is None else f"{shown(low)} – {shown(high)}"
        title = both(escaped(rung["title"]), RUNGS.get(rung["name"], escaped(rung["title"])))
        rows.append(
            f'<tr class="{"kept" if rung["kept"] else "tried"}"><td>{title}</td>'
            f'<td class="n">{number(figure, rung[figure])}</td>'
            f'<td class="n">{span}</td><td class="n">{duration(rung["seconds"])}</td>'
            f"<td>{both('chosen', '选用') if rung['kept'] else ''}</td></tr>"
        )
    for rung in result.get("left_out") or []:
        title = both(escaped(rung["title"]), RUNGS.get(rung["name"], escaped(rung["title"])))
        why = both(f"left out, {escaped(rung['why'])}", "时间不够，未做" if rung["for_time"] else "未做：不会再有提高")
        rows.append(f'<tr class="tried"><td>{title}</td><td colspan="4">{why}</td></tr>')
    titles = (
        ("rung", "方法"),
        ("validation", "验证集"),
        ("95 % interval", "95 % 区间"),
        ("time", "用时"),
        ("", ""),
    )
    head = "".join(f'<th class="{"n" if 0 < i < 4 else "text"}">{both(*title)}</th>' for i, title in enumerate(titles))
    return f'<div class="wide"><table class="rungs"><tr>{head}</tr>{"".join(rows)}</table></div>{_why(rungs)}'


def _why(rungs: list[dict[str, Any]]) -> str:
    chosen = next((rung for rung in rungs if rung["kept"]), None)
    if chosen is None:
        return ""
    title, chinese = escaped(chosen["title"]), RUNGS.get(chosen["name"], escaped(chosen["title"]))
    images = f"{chosen['images']:,}"
    later = rungs[rungs.index(chosen) + 1 :]
    english = f"Each rung trains more of the network. It is kept only if it beats the best so far on the same {images} "
    english += "images by more than one standard error of the difference; a tie goes to the simpler. "
    english += f"So it is the {title}" + (", which nothing above it beat." if later else ", the last that was tried.")
    zh = f"每一级训练网络的更多部分。在同样 {images} 张图片上，只有比目前最好的高出一个标准误以上才会被采用；"
    zh += "持平时取更简单的。"
    zh += f"因此选用{' ' if chinese.isascii() else ''}{chinese}"
    zh += "，后面的都没有胜过它。" if later else "，它也是最后尝试的一级。"
    if rungs[0]["name"] == "knn":
        english, zh = english + " k-NN is not trained and only a yardstick.", zh + "k 近邻不经训练，只作参照。"
    return f"<p>{both(english, zh)}</p>"


def start_sentence(result: Mapping[str, Any]) -> str:
    """Where the weights come from, their licence, and what was expected of them."""
    start = result.get("start")
    if start is None:
        return ""
    if start["name"] is None:
        scratch = "It started from nothing: no trained weights could be had, so far more labels are needed."
        return f"<p>{both(scratch, '从零开始：没有可用的预训练权重，因此需要多得多的标签。')}</p>"
    name, licence = name_html(start["name"]), start.get("licence")
    terms = f"licence {escaped(licence)}" if licence else "licence not known: look it up before you publish the model"
    terms_chinese = f"许可证 {escaped(licence)}" if licence else "许可证未知，发布模型前请查清"
    expected = start.get("expected")
    english = f"It started from the trained weights {name} ({terms})."
    chinese = f"从预训练权重 {name} 开始（{terms_chinese}）。"
    if expected is not None:
        english += f" They were picked because {escaped(start['why'])}."
        chinese += f"选择它的依据：按这台机器的速度，所有图片过一遍编码器预计约 {duration(expected)}。"
    english += f" The whole run took {duration(result['seconds'])}."
    chinese += f"整次训练用了 {duration(result['seconds'])}。"
    return f"<p>{both(english, chinese)}</p>"


def smoothing_sentence(smoothing: Smoothing | None, confidence: float | None, accuracy: float | None) -> str:
    """What smoothing does to loss and confidence. `confidence`: the mean over the evaluated images."""
    english, chinese = [], []
    if smoothing is not None and smoothing.eps > 0:
        eps, K, aim = f"{smoothing.eps:g}", smoothing.classes, f"{100 * smoothing.confidence:.3g} %"
        best_loss = -math.log(smoothing.confidence)
        english.append(
            f"Label smoothing of ε = {eps} with K = {K} classes asks for {aim} confidence in the label (1 − ε + ε/K), "
            f"not for 100 %. So the training loss cannot fall below {smoothing.floor:.4f}, however good the model is"
            f"{', and mixed images (mixup, CutMix) raise that floor further' if smoothing.mixed else ''}; the "
            f"validation loss is measured without smoothing, and is {best_loss:.4f} where every answer is right at "
            "just that confidence."
        )
        chinese.append(
            f"标签平滑 ε = {eps}、K = {K} 个类别，要求对标签的置信度为 {aim}（1 − ε + ε/K），而不是 100 %。"
            f"因此模型再好，训练损失也不会低于 {smoothing.floor:.4f}"
            f"{'；混合图片（mixup、CutMix）会使这个下限更高' if smoothing.mixed else ''}；"
            f"验证损失不含平滑，若每张都以恰好这个置信度答对，验证损失为 {best_loss:.4f}。"
        )
    elif smoothing is not None:
        english.append("There was no label smoothing, so the loss has no floor but 0.")
        chinese.append("没有使用标签平滑，损失的下限就是 0。")
    if confidence is not None and accuracy is not None:
        english.append(f"On average it is {percent(confidence)} confident, and right on {percent(accuracy)}.")
        chinese.append(f"它的平均置信度为 {percent(confidence)}，答对 {percent(accuracy)}。")
    return f"<p>{both(' '.join(english), ''.join(chinese))}</p>" if english else ""
