"""A check -> check.html, one file with the images in it, and cleaned.csv, the table of corrections to act on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vitlab.checkpoints.native import write_together
from vitlab.data_check.duplicates import Copy
from vitlab.data_check.result import IMBALANCE, CheckResult, shown_kind
from vitlab.errors import ImageError
from vitlab.images.sources.corrections import corrections_text
from vitlab.images.sources.dataset import Dataset, TargetKind
from vitlab.language import to_chinese
from vitlab.training.report.html import both, data_url, duration, escaped, name_html, percent, translated
from vitlab.training.report.page import html_document

PAIRS, SINGLES = 30, 48  # images of a section; the table lists all
THUMBNAIL = 176  # pixels
NO_LABELS = both("no labels", "没有标签")
UNLIKE = {
    True: ("Unlike their class", "离群图片"),
    False: ("Unlike the others", "离群图片"),
}  # by whether there are classes
EDIT = {
    True: both(
        "Look at the images below, and edit the column <b>action</b>: keep, drop, or relabel (to suggested_label).",
        "看下面的图片，修改 <b>action</b> 一列：keep（保留）、drop（去掉）或 relabel（改成 suggested_label）。",
    ),
    False: both(
        "Look at the images below, and edit the column <b>action</b>: keep or drop. Labels and numbers are corrected "
        "in the table of the data itself.",
        "看下面的图片，修改 <b>action</b> 一列：keep（保留）或 drop（去掉）。标签和数值请在数据自己的表格里改正。",
    ),
}
LABELS_BY: dict[TargetKind, tuple[str, str]] = {
    "class": (
        "confident learning (arXiv:1911.00068) on a linear probe, in five folds",
        "置信学习（arXiv:1911.00068），线性探测，五折",
    ),
    "labels": (
        "confident learning (arXiv:1911.00068) for each label by itself, on a linear probe, in five folds",
        "置信学习（arXiv:1911.00068），逐个标签，线性探测，五折",
    ),
    "number": ("not looked for: numbers are not examined", "未查找：不检查数值"),
}


def write_check(result: CheckResult, data: Dataset, page: Path, table: Path) -> None:
    """Both files, or none."""
    result.page, result.table = page, table
    html = html_document(f"{result.name}: check", _Page(result, data).body(), _css())
    text = corrections_text(result.corrections())
    page.parent.mkdir(parents=True, exist_ok=True)
    write_together(
        {
            page: lambda temporary: temporary.write_text(html, encoding="utf-8"),
            table: lambda temporary: temporary.write_text(text, encoding="utf-8"),
        }
    )


def _css() -> str:
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8")


class _Page:
    def __init__(self, result: CheckResult, data: Dataset):
        self.result, self.data = result, data
        self.urls: dict[int, str] = {}

    def body(self) -> str:
        parts = (
            self.header,
            self.steps,
            self.leaks,
            self.conflicts,
            self.unreadable,
            self.suspects,
            self.duplicates,
            self.outliers,
            self.odd,
            self.classes,
            self.method,
        )
        return "\n".join(filter(None, (part() for part in parts)))

    # ------------------------------------------------------------------------------------------------------- sections

    def header(self) -> str:
        r = self.result
        about = [f"{split} {count:,}" for split, count in r.splits.items()]
        about.append(_labels_of(r))
        tiles = [
            _tile("In two splits", "跨划分重复", len(r.leaks), "bad"),
            _tile("Copies, other label", "同图异标", len(r.conflicts), "bad"),
            _tile("Unreadable", "无法读取", len(r.unreadable), "bad"),
            _tile("Likely wrong labels", "可疑标签", len(r.suspects) + len(r.doubtful), "doubt"),
            _tile("Copies in a split", "划分内重复", len(r.duplicates), "doubt"),
            _tile(*UNLIKE[r.kind == "class"], len(r.outliers), "doubt"),
            _tile("Odd images", "异常图片", len({*r.tiny, *r.extreme, *r.blank}), "doubt"),
        ]
        images = both(f"{len(r.images):,} images", f"{len(r.images):,} 张图片")
        line = f"{images} · {' · '.join(about)} · {name_html(r.source)}"
        return (
            f'<header>\n<h1>{name_html(r.name)}</h1>\n<p>{line}</p>\n</header>\n<dl class="tiles">{"".join(tiles)}</dl>'
        )

    def steps(self) -> str:
        r = self.result
        rows = r.corrections()
        if not rows:
            text = both("Nothing to correct was found.", "没有发现需要更正的地方。")
            return f"<section>\n<p>{text}</p>\n</section>"
        drop = sum(row.action == "drop" for row in rows)
        english = f"{escaped(r.table)} lists {len(rows):,} images with a problem; {drop:,} of them are marked drop."
        steps = [
            both(english, f"表格列出 {len(rows):,} 张有问题的图片，其中 {drop:,} 张已标为 drop。"),
            EDIT[r.kind == "class"],
            f"{both('Train with the corrections:', '按更正后的数据训练：')} <code>{escaped(r.train_command())}</code>",
            f"{both('Check what is left:', '再检查一遍：')} <code>{escaped(r.check_command())}</code>",
        ]
        items = "".join(f"<li>{step}</li>" for step in steps)
        note = both("Your files are not changed.", "你的文件不会被改动。")
        content = f'<ol class="steps">{items}</ol>\n<p class="more">{note}</p>'
        return _section("What to do", "怎么做", "", content, None)

    def leaks(self) -> str:
        r = self.result
        if not r.leaks:
            return ""
        leaked: dict[str, set[int]] = {}
        for copy in r.leaks:
            leaked.setdefault(r.images[copy.image].split or "train", set()).add(copy.image)
        shares = [(split, f"{len(images):,}", f"{r.splits[split]:,}") for split, images in leaked.items()]
        counts = ", ".join(f"{some} of {every} in {split}" for split, some, every in shares)
        chinese = "，".join(f"{split} 的 {every} 张中有 {some} 张" for split, some, every in shares)
        caption = both(
            f"Images that a split before theirs holds too ({counts}): scores on them measure memory. The copy in the "
            "earlier split is marked drop.",
            f"这些验证集或测试集图片也出现在前面的划分中（{chinese}）：在它们上面得分高只说明记住了。"
            "前一划分中的那份已标为 drop。",
        )
        return _section("In two splits", "跨划分重复（泄漏）", caption, self.pairs(r.leaks), len(r.leaks), bad=True)

    def conflicts(self) -> str:
        caption = both(
            "The same image under two labels: at least one is wrong.", "同一张图片有两个标签：至少有一个是错的。"
        )
        pairs = self.result.conflicts
        return _section("Copies with different labels", "同图异标", caption, self.pairs(pairs), len(pairs), bad=True)

    def unreadable(self) -> str:
        r = self.result
        rows = [
            f'<tr><td class="name">{escaped(r.images[image].path)}</td><td class="name">{escaped(error)}</td></tr>'
            for image, error in list(r.unreadable.items())[:SINGLES]
        ]
        table = f'<div class="wide"><table class="files">{"".join(rows)}</table></div>' if rows else ""
        caption = both("Marked drop.", "已标为 drop。")
        return _section(
            "Unreadable", "无法读取", caption, table + _more(r.unreadable, SINGLES), len(r.unreadable), bad=True
        )

    def suspects(self) -> str:
        r = self.result
        if r.kind == "labels":
            return self.doubtful()
        figures = []
        for s in r.suspects[:SINGLES]:
            given, suggested = name_html(r.classes[s.given]), name_html(r.classes[s.suggested])
            figures.append(self.figure(s.image, f"{given} → <b>{suggested}</b> · {percent(s.confidence)}"))
        share = chinese = ""
        if r.wrong_labels is not None:
            share = f" About {percent(r.wrong_labels)} of all labels may be wrong."
            chinese = f"全部标签中约 {percent(r.wrong_labels)} 可能有误。"
        caption = both(
            "Label → what a probe that has not seen the image takes it for, and how sure it is; the surest first."
            f"{share}",
            f"标签 → 未见过该图的线性探测的判断及其把握，把握最大的在前。{chinese}",
        )
        content = _gallery(figures) + _more(r.suspects, SINGLES)
        return _section("Likely wrong labels", "可疑标签", caption, content, len(r.suspects))

    def doubtful(self) -> str:
        r = self.result
        figures = []
        for d in r.doubtful[:SINGLES]:
            name, given = name_html(r.classes[d.label]), name_html(r.images[d.image].label or "")
            doubt = (f"likely lacks {name}", f"可能漏标 {name}")
            if d.given:
                doubt = (f"likely not {name}", f"可能不是 {name}")
            figures.append(self.figure(d.image, f"{given} → <b>{both(*doubt)}</b> · {percent(d.confidence)}"))
        share = chinese = ""
        if r.wrong_labels is not None:
            share = f" About {percent(r.wrong_labels)} of all answers, label by label, may be wrong."
            chinese = f"逐个标签计，约 {percent(r.wrong_labels)} 可能有误。"
        caption = both(
            "Each label by itself: the labels of the image → what a probe that has not seen it says of one, and "
            f"how sure it is; the surest first.{share}",
            f"逐个标签检查：图片的标签 → 未见过该图的线性探测对其中一个标签的判断及其把握，把握最大的在前。{chinese}",
        )
        content = _gallery(figures) + _more(r.doubtful, SINGLES)
        return _section("Likely wrong labels", "可疑标签", caption, content, len(r.doubtful))

    def duplicates(self) -> str:
        caption = both(
            "Copies within one split. Of exact ones all but the first are marked drop; without val, of near ones too.",
            "同一划分内的重复。完全相同的只留第一张，其余标为 drop；没有验证集时，近似重复也是如此。",
        )
        pairs = self.result.duplicates
        return _section("Copies in a split", "划分内重复", caption, self.pairs(pairs), len(pairs))

    def outliers(self) -> str:
        r = self.result
        figures = [
            self.figure(o.image, f"{name_html(r.images[o.image].label or '')} · {o.deviation:.1f} σ")
            for o in r.outliers[:SINGLES]
        ]
        caption = both(
            "Far from the nearest others, in robust standard deviations. Rare is not wrong: look.",
            "与其他图片相距最远（以稳健标准差计）。少见不等于有错，请看一看。",
        )
        if r.kind == "class":
            caption = both(
                "Far from the nearest others of their class, in robust standard deviations. Rare is not wrong: look.",
                "与同类图片相距最远（以稳健标准差计）。少见不等于有错，请看一看。",
            )
        content = _gallery(figures) + _more(r.outliers, SINGLES)
        return _section(*UNLIKE[r.kind == "class"], caption, content, len(r.outliers))

    def odd(self) -> str:
        r = self.result
        kinds: dict[int, list[str]] = {}
        for image, (height, width) in r.tiny.items():
            kinds.setdefault(image, []).append(f"{both('tiny', '过小')} · {width} × {height}")
        for image, (height, width) in r.extreme.items():
            kinds.setdefault(image, []).append(f"{both('extreme shape', '长宽比极端')} · {width} × {height}")
        for image in r.blank:
            kinds.setdefault(image, []).append(both("blank", "空白"))
        figures = [self.figure(image, "<br />".join(texts)) for image, texts in list(kinds.items())[:SINGLES]]
        caption = both(
            "Against what is usual in these data: very small, very long, or without content.",
            "与其余图片相比：过小、过长或没有内容。",
        )
        return _section("Odd images", "异常图片", caption, _gallery(figures) + _more(kinds, SINGLES), len(kinds))

    def classes(self) -> str:
        r = self.result
        if not r.counts:
            return ""
        wrong: dict[str, int] = {}
        for suspect in r.suspects:
            wrong[r.classes[suspect.given]] = wrong.get(r.classes[suspect.given], 0) + 1
        for doubtful in r.doubtful:
            wrong[r.classes[doubtful.label]] = wrong.get(r.classes[doubtful.label], 0) + 1
        most = max((max(counts) for counts in r.counts.values()), default=1)
        head = "".join(f'<th class="n">{split}</th>' for split in r.counts)
        rows = []
        first = next(iter(r.counts))
        for k in np.argsort(-np.array(r.counts[first]), kind="stable"):
            cells = "".join(f'<td class="n">{counts[k]:,}</td>' for counts in r.counts.values())
            bar = f'<span class="bar" style="--share:{r.counts[first][k] / max(most, 1):.4f}"></span>'
            name = r.classes[k]
            rows.append(f'<tr><td>{name_html(name)}{bar}</td>{cells}<td class="n">{wrong.get(name, 0):,}</td></tr>')
        ratio = r.imbalance
        verdict = ""
        if ratio is not None:
            english = f"The largest class of train has {ratio:.1f} times the images of the smallest."
            chinese = f"训练集中最大的类是最小的 {ratio:.1f} 倍。"
            if r.kind == "labels":
                english = f"The most frequent label of train has {ratio:.1f} times the images of the rarest."
                chinese = f"训练集中最常见的标签的图片数是最少见的 {ratio:.1f} 倍。"
            if ratio >= IMBALANCE and r.kind == "class":
                english += " Accuracy will hide how the small ones do: read it class by class."
                chinese += "总准确率会掩盖小类的表现：请逐类查看。"
            verdict = both(english, chinese)
        kind = both("class", "类别") if r.kind == "class" else both("label", "标签")
        table = (
            f'<table class="classes"><thead><tr><th>{kind}</th>{head}'
            f'<th class="n">{both("likely wrong", "可疑标签")}</th></tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table>"
        )
        title = ("Classes", "各类图片数") if r.kind == "class" else ("Labels", "各标签图片数")
        return _section(*title, verdict, f'<div class="wide tall">{table}</div>', None)

    def method(self) -> str:
        r, m = self.result, self.result.method
        threshold = f"{m.copy_threshold:.2f}"
        near = ("details correlate at {} or more", "细节的相关系数不低于 {}")
        if m.copy_threshold > 1:
            near = ("not looked for", "未查找")
        rows = {
            ("features", "特征"): (
                f"{escaped(m.model)}: {escaped(m.why)}",
                f"{escaped(m.model)}：{escaped(to_chinese(m.why))}",
            ),
            ("exact copies", "完全相同"): ("equal decoded pixels", "解码后的像素相同"),
            ("near copies", "近似重复"): (
                f"{near[0].format(threshold)}; also crops of 79 % or more of the sides, and mirror images",
                f"{near[1].format(threshold)}；也包括保留边长 79 % 以上的裁剪和镜像",
            ),
            ("likely wrong labels", "可疑标签"): LABELS_BY[r.kind],
            ("unlike the others", "离群图片"): (
                f"mean cosine distance to the five nearest{' of the class' if r.kind == 'class' else ''}",
                f"与{'同类中' if r.kind == 'class' else ''}最近的五张图片的平均余弦距离",
            ),
            ("time", "用时"): (duration(m.seconds),) * 2,
        }
        table = "".join(
            f'<tr><th>{both(*key)}</th><td class="name">{both(*text)}</td></tr>' for key, text in rows.items()
        )
        note = both("note", "说明")
        notes = "".join(f'<tr><th>{note}</th><td class="name">{translated(text)}</td></tr>' for text in r.notes)
        content = f'<div class="wide"><table class="pairs">{table}{notes}</table></div>'
        return _section("How this was done", "检查方法", "", content, None)

    # --------------------------------------------------------------------------------------------------------- images

    def pairs(self, copies: list[Copy]) -> str:
        if not copies:
            return ""
        shown = []
        for copy in copies[:PAIRS]:
            two = "".join(self.half(image) for image in (copy.image, copy.of))
            shown.append(f'<div><div class="two">{two}</div><p class="how">{_how_alike(copy)}</p></div>')
        return f'<div class="pairs-of-images">{"".join(shown)}</div>{_more(copies, PAIRS)}'

    def half(self, image: int) -> str:
        info = self.result.images[image]
        label = "" if info.label is None else f" · {name_html(info.label)}"
        split = f'<span class="split">{escaped(info.split or "train")}</span>'
        return f"<figure>{self.img(image)}<figcaption>{split}{label}{_path(info.path)}</figcaption></figure>"

    def figure(self, image: int, caption: str) -> str:
        info = self.result.images[image]
        return f"<figure>{self.img(image)}<figcaption>{caption}{_path(info.path)}</figcaption></figure>"

    def img(self, image: int) -> str:
        if image not in self.urls:
            try:
                pixels = self.data.read(image)
            except ImageError:  # it could be read a moment ago
                pixels = np.zeros((1, 1, 3), dtype=np.uint8)
            small = ' class="pixels"' if max(pixels.shape[:2]) <= 96 else ""
            path = escaped(self.result.images[image].path)
            self.urls[image] = f'<img{small} alt="{path}" src="{data_url(pixels, THUMBNAIL)}" />'
        return self.urls[image]


def _labels_of(r: CheckResult) -> str:
    n = len(r.classes)
    if not n:
        return NO_LABELS
    if r.kind == "number":
        return both("a number for each image", "每张图片一个数值")
    return both(f"{n} classes", f"{n} 个类别") if r.kind == "class" else both(f"{n} labels", f"{n} 种标签")


def _how_alike(copy: Copy) -> str:
    if copy.kind != "near":
        chinese = {"same file": "同一文件", "same pixels": "像素相同"}[copy.kind]
    elif not copy.similarity:
        chinese = "经由另一份重复"
    else:
        chinese = f"近似，{copy.similarity:.2f}" + ("，镜像" if copy.mirrored else "")
    return both(shown_kind(copy), chinese)


def _path(path: str) -> str:
    return f'<small title="{escaped(path)}">{name_html(path)}</small>'


def _gallery(figures: list[str]) -> str:
    return f'<div class="gallery">{"".join(figures)}</div>' if figures else ""


def _more(items: Iterable[object], most: int) -> str:
    left = len(list(items)) - most
    return (
        f'<p class="more">{both(f"and {left:,} more, in the table", f"另有 {left:,} 张，见表格")}</p>'
        if left > 0
        else ""
    )


def _tile(title: str, chinese: str, count: int, kind: str) -> str:
    return (
        f'<div class="{kind if count else "good"}"><dt>{both(title, chinese)}</dt>'
        f'<dd><data value="{count}">{count:,}</data></dd></div>'
    )


def _section(title: str, chinese: str, caption: str, content: str, count: int | None, bad: bool = False) -> str:
    """Nothing where there is nothing to show."""
    if not content:
        return ""
    number = "" if count is None else f" <b>{count:,}</b>"
    kind = ' class="bad"' if bad else ""
    text = f"<p>{caption}</p>\n" if caption else ""
    return f"<section{kind}>\n<h2>{both(title, chinese)}{number}</h2>\n{text}{content}\n</section>"
