"""What came out of a claim: its values, its verdict, and how both are written for people.

result.json holds the exact values; the verdict is always computed from them, so it cannot disagree with them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from vitlab.language import Language
from vitlab.study.reproduce.claim import Claim
from vitlab.study.reproduce.claims import CLAIMS
from vitlab.study.reproduce.verdict import ClaimOutcome, Criterion, Decision, verdict
from vitlab.training.runs import to_markdown

NOT_RUN = "not run"
WORDS: dict[str, str] = {  # English -> Chinese
    ClaimOutcome.HOLDS: "成立",
    ClaimOutcome.FAILS: "不成立",
    ClaimOutcome.UNDECIDED: "无法判定",
    NOT_RUN: "未运行",
    "claim": "论断",
    "title": "内容",
    "paper": "论文",
    "the paper says": "论文的说法",
    "here": "这里的结果",
    "verdict": "结论",
    "command": "命令",
    "time": "耗时",
    "about": "约",
    "arm": "对比项",
    "mean": "均值",
    "lowest": "最低",
    "highest": "最高",
    "criterion": "判据",
    "required": "要求",
    "measured": "实测",
    "95 % interval": "95 % 区间",
    "points": "个百分点",
}

ARMS: dict[str, str] = {  # names of arms, and parts of a criterion's label: English -> Chinese
    "class token": "类别 token",
    "mean": "平均池化",
    "learned": "可学习",
    "sincos": "正余弦",
    "none": "无位置",
    "trained": "训练后",
    "untrained": "训练前",
    "first layer, widest head": "第一层看得最远的头",
    "first layer, narrowest head": "第一层看得最近的头",
    "first layer, mean": "第一层平均",
    "last layer, mean": "最后一层平均",
    "outlier tokens": "离群 token",
    "softmax(QKᵀ)V of the ViT": "ViT 的 softmax(QKᵀ)V",
    "whole ViT": "整个 ViT",
    "whole Swin": "整个 Swin",
    "lead of the ResNet at 10 %": "ResNet 的领先：10 % 时",
    "at 100 %": "100 % 时",
    "with teacher": "有教师",
    "labels only": "只用标签",
    "the teacher": "教师",
    "no mixing": "不混合",
    "conv stem, AdamW": "卷积 stem，AdamW",
    "conv stem, SGD": "卷积 stem，SGD",
    "patch stem, AdamW": "图块 stem，AdamW",
    "patch stem, SGD": "图块 stem，SGD",
    "loss by SGD: patch stem": "换成 SGD 的损失：图块 stem",
    "conv stem": "卷积 stem",
    "pre-norm, warm-up": "pre-norm，预热",
    "pre-norm, no warm-up": "pre-norm，不预热",
    "post-norm, warm-up": "post-norm，预热",
    "post-norm, no warm-up": "post-norm，不预热",
    "both": "两者都有",
    "no centring": "不居中",
    "no sharpening": "不锐化",
    "name alone": "只有类别名",
    "one prompt": "一个提示",
    "all prompts": "全部提示",
    "all tokens": "全部 token",
}
MINUS = " − "  # between the arms of a criterion


def arm_in_language(label: str, language: Language) -> str:
    """The name of an arm, or a criterion's difference of two."""
    if language == "en":
        return label
    shares = re.compile(r"(ViT|ResNet|ToMe|random), ")  # "ViT, 10 %"
    named = [ARMS.get(part) or shares.sub(r"\1，", part).replace("random", "随机") for part in label.split(MINUS)]
    return MINUS.join(named)


def in_language(text: str, language: Language) -> str:
    return WORDS.get(text, text) if language == "zh" else text


def colon(language: Language) -> str:
    return "：" if language == "zh" else ": "


@dataclass
class Result:
    claim: Claim
    values: dict[str, dict[str, float]] = field(default_factory=dict)  # arm -> seed or model -> value
    seconds: float = 0.0
    settings: tuple[str, ...] = ()  # of all its trainings
    command: str = ""
    version: str = ""

    @property
    def n(self) -> int:
        return max((len(values) for values in self.values.values()), default=0)

    @property
    def decisions(self) -> list[Decision]:
        return [criterion.decide(self.values) for criterion in self.claim.rule]

    @property
    def verdict(self) -> str:
        return verdict(self.decisions).value if self.values else NOT_RUN

    def to_dict(self) -> dict[str, Any]:
        """NaN and infinity, of intervals without a spread, become None."""
        finite = lambda x: x if math.isfinite(x) else None
        paper = self.claim.paper
        criteria = [
            {
                "criterion": d.criterion.label,
                "low": finite(d.criterion.low),
                "high": finite(d.criterion.high),
                "mean": finite(d.mean),
                "interval": [finite(d.low), finite(d.high)],
                "n": d.n,
                "outcome": d.outcome.value,
            }
            for d in self.decisions
        ]
        return {
            "claim": self.claim.name,
            "title": self.claim.title.en,
            "paper": {"name": paper.name, "arxiv": paper.arxiv, "place": paper.place},
            "verdict": self.verdict,
            "n": self.n,
            "criteria": criteria,
            "values": self.values,
            "seconds": self.seconds,
            "settings": list(self.settings),
            "command": self.command,
            "vitlab": self.version,
        }


def read_result(contents: Mapping[str, Any]) -> Result:
    return Result(
        CLAIMS[contents["claim"]],
        {arm: dict(values) for arm, values in contents["values"].items()},
        contents["seconds"],
        tuple(contents["settings"]),
        contents["command"],
        contents["vitlab"],
    )


def overview(results: Sequence[Result], language: Language) -> list[dict[str, Any]]:
    """Rows of `vitlab reproduce`: each claim, its cost, and its verdict if it was run."""
    return [
        {
            in_language("claim", language): r.claim.name,
            in_language("title", language): r.claim.title[language],
            in_language("paper", language): f"{r.claim.paper.name}, arXiv:{r.claim.paper.arxiv}",
            in_language("time", language): _duration(r.seconds) if r.values else _cost(r.claim, language),
            "n": str(r.n) if r.values else "",
            in_language("verdict", language): in_language(r.verdict, language),
        }
        for r in results
    ]


def summary(results: Sequence[Result], language: Language) -> str:
    """The table of the documentation, in Markdown: what the papers say, what came out here, verdict, command, time."""
    rows = [
        {
            in_language("claim", language): f"{r.claim.title[language]}<br>`{r.command or _command(r.claim)}`",
            in_language(
                "the paper says", language
            ): f"{_citation(r.claim, language)}{colon(language)}{r.claim.says[language]}",
            in_language("here", language): "<br>".join(_measured(r, d, language) for d in r.decisions if r.values),
            "n": str(r.n) if r.values else "",
            in_language("verdict", language): f"**{in_language(r.verdict, language)}**",
            in_language("time", language): _duration(r.seconds) if r.values else "",
        }
        for r in results
    ]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def headline(result: Result, language: Language) -> str:
    return f"{result.claim.title[language]}{colon(language)}{in_language(result.verdict, language)}"


def report(result: Result, language: Language, plot: str | None, heading: str = "#") -> str:
    """One claim in Markdown: paper, experiment, arms with their spread, criteria, plot."""
    claim, word = result.claim, lambda text: in_language(text, language)
    stop = "。" if language == "zh" else ". "
    lines = [
        f"{heading} {claim.title[language]}",
        f"{word('verdict').capitalize()}{colon(language)}**{word(result.verdict)}**",
        f"{word('paper').capitalize()}{colon(language)}{_citation(claim, language)}{stop}{claim.says[language]}",
        claim.here[language],
        to_markdown(arms(result, language)).rstrip(),
        to_markdown(criteria(result, language)).rstrip(),
        *([f"![{claim.name}]({plot})"] if plot else []),
        f"`{result.command}` ({_duration(result.seconds)})",
    ]
    return "\n\n".join(lines) + "\n"


def arms(result: Result, language: Language) -> list[dict[str, Any]]:
    """A row for each arm: mean and spread."""
    claim = result.claim
    return [
        {
            in_language("arm", language): arm_in_language(arm.name, language),
            in_language("mean", language): number(claim, fmean(values)),
            in_language("lowest", language): number(claim, min(values)),
            in_language("highest", language): number(claim, max(values)),
            "n": str(len(values)),
        }
        for arm in claim.arms
        if (values := list(result.values.get(arm.name, {}).values()))
    ]


def criteria(result: Result, language: Language) -> list[dict[str, Any]]:
    """A row for each criterion: what is required, what was measured, and what follows."""
    claim = result.claim
    return [
        {
            in_language("criterion", language): arm_in_language(decision.criterion.label, language),
            in_language("required", language): required(claim, decision.criterion, language),
            in_language("measured", language): change(claim, decision.criterion, decision.mean, language),
            in_language("95 % interval", language): _interval(claim, decision),
            "n": str(decision.n),
            in_language("verdict", language): in_language(decision.outcome.value, language),
        }
        for decision in result.decisions
    ]


def csv_rows(result: Result) -> list[dict[str, Any]]:
    """A row for each value."""
    return [
        {"claim": result.claim.name, "arm": arm, "unit": unit, "value": value}
        for arm, values in result.values.items()
        for unit, value in values.items()
    ]


def number(claim: Claim, value: float) -> str:
    if claim.scale == "accuracy":
        return f"{100 * value:.1f} %"
    return f"{value:.3f}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"


def change(claim: Claim, criterion: Criterion, value: float, language: Language) -> str:
    """The value of a criterion: a difference of accuracies is in points."""
    if not math.isfinite(value):
        return "–"
    if claim.scale == "accuracy" and not math.fsum(criterion.weights.values()):
        return f"{100 * value:+.1f} {in_language('points', language)}"
    return number(claim, value)


def required(claim: Claim, criterion: Criterion, language: Language) -> str:
    """The range in which a criterion holds."""
    show = lambda bound: change(claim, criterion, bound, language) if bound else "0"
    if math.isinf(criterion.high):
        return f"> {show(criterion.low)}"
    if math.isinf(criterion.low):
        return f"< {show(criterion.high)}"
    return f"{show(criterion.low)} .. {show(criterion.high)}"


def _measured(result: Result, decision: Decision, language: Language) -> str:
    claim = result.claim
    mean = change(claim, decision.criterion, decision.mean, language)
    label = arm_in_language(decision.criterion.label, language)
    return f"{label}{colon(language)}{mean} ({_interval(claim, decision)})"


def _interval(claim: Claim, decision: Decision) -> str:
    if not math.isfinite(decision.low):
        return "–"
    if claim.scale == "accuracy" and not math.fsum(decision.criterion.weights.values()):
        return f"{100 * decision.low:+.1f} .. {100 * decision.high:+.1f}"
    return f"{number(claim, decision.low)} .. {number(claim, decision.high)}"


def _citation(claim: Claim, language: Language) -> str:
    paper, comma = claim.paper, "，" if language == "zh" else ", "
    return comma.join([paper.name, f"[arXiv:{paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})", paper.place])


def _command(claim: Claim) -> str:
    return f"vitlab reproduce {claim.name}"


def _cost(claim: Claim, language: Language) -> str:
    return f"{in_language('about', language)} {_duration(60 * claim.minutes)}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
