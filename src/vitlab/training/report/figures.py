"""Figures drawn with matplotlib: the curves of many runs, and what augmentation makes of images."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.errors import UsageError
from vitlab.images.fonts import families
from vitlab.optional import require
from vitlab.training.report.html import cut, ems, printable
from vitlab.training.runs import Run

if TYPE_CHECKING:  # it imports torch, which `vitlab runs` can do without
    from vitlab.training.preview import Parts, Preview

INK, SOFT, LINE = "#1c2126", "#646d78", "#d5d9dd"
DPI, SIDE, GAP, MARGIN = 150, 224, 8, 28  # of a preview; the last three in pixels


def figure_format(path: Path, option: str) -> str:
    """The format that a file's ending asks for; what cannot be drawn is an error, before anything is computed."""
    require(option, "matplotlib")
    kind = path.suffix.lstrip(".").lower() or "png"
    if kind not in ("png", "svg", "pdf", "jpg", "webp"):
        raise UsageError(f"{option} {path}: cannot draw .{kind}; name a .png, .svg or .pdf file.")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; name a .png, .svg or .pdf file in it.")
    return kind


def _able_to_draw(texts: str) -> Any:
    from matplotlib import rc_context

    return rc_context({"font.family": families(texts), "text.usetex": False, "svg.fonttype": "none"})


def _save(figure: Any, path: Path, kind: str) -> None:
    from vitlab.checkpoints.native import write_whole

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda temporary: figure.savefig(temporary, format=kind))


# ------------------------------------------------------------------------------------------------------------- curves


def plot(runs: list[Run], path: Path) -> list[str]:
    """Draw the validation accuracy of all runs into one image; returns the names of runs that have none."""
    drawn = [run for run in runs if run.val_curve]
    if not drawn:
        raise UsageError(f"--out {path}: none of the {len(runs)} runs has been evaluated yet, so there is no curve.")
    kind = figure_format(path, "--out")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    with _able_to_draw("".join(run.name for run in drawn)):
        figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")  # no pyplot: no window, no global state
        axes = figure.add_subplot()
        for i, run in enumerate(drawn):
            steps, top1 = zip(*run.val_curve, strict=True)
            dashes = ("-", "--", ":", "-.")[i // 10 % 4]  # the ten colours come round again
            marker = "o" if len(steps) <= 60 else ""
            axes.plot(steps, top1, dashes, color=f"C{i % 10}", marker=marker, markersize=3, linewidth=1.6)
        axes.set(xlabel="step", ylabel="validation accuracy")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        legend = axes.legend(
            axes.get_lines(), ["run"] * len(drawn), loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False
        )
        for text, run in zip(legend.get_texts(), drawn, strict=True):  # set here, a name like _x or $a$ is only a name
            best = max(run.val_curve, key=lambda point: point[1])[1]
            text.set_parse_math(False)
            text.set_text(f"{run.name if len(run.name) <= 40 else run.name[:39] + '…'}  {100 * best:.2f} %")
        _save(figure, path, kind)
    return [run.name for run in runs if not run.val_curve]


# ------------------------------------------------------------------------------------------------------------ preview


def draw_preview(preview: Preview, path: Path) -> None:
    """A row for each image: as it is evaluated, then as the model sees it; below them, samples of mixed batches."""
    kind = figure_format(path, "--preview")
    from matplotlib.figure import Figure

    rows: list[tuple[str, str, list[np.ndarray], list[str]]] = []  # label, remark, images, captions
    for row in preview.rows:
        rows.append((_cut(row.label, 16), _cut(row.name[::-1], 20)[::-1], row.images, []))
    for batch in preview.mixed:
        rows.append((batch.how, f"step {batch.step}, λ {batch.lam:.2f}", batch.images, _captions(batch.labels)))
    h, w, _ = _fit(preview.rows[0].images[0]).shape
    left = round(MARGIN + max(max(19 * ems(label), 14.5 * ems(remark)) for label, remark, _, _ in rows) + 20)
    at = [left + i * (w + GAP) + (GAP if i else 0) for i in range(len(preview.rows[0].images))]  # "before" stands apart
    width = max(at[-1] + w + MARGIN, 640)
    title = _cut(preview.title, (width - 2 * MARGIN) / 25)
    about = [preview.about, *textwrap.wrap("  ".join(preview.settings), (width - 2 * MARGIN) // 10)]
    top = MARGIN + 76 + 24 * len(about)
    height = top + sum(h + GAP + 26 * _lines(texts) for *_, texts in rows) + (44 if preview.mixed else 0) + MARGIN - GAP
    all_texts = [title, *about, *(text for label, remark, _, texts in rows for text in (label, remark, *texts))]
    with _able_to_draw("".join(all_texts)):
        figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), autoscale_on=False)  # in pixels
        axes.set_axis_off()

        def write(
            x: float, y: float, text: str, size: float, colour: str, ha: Any = "left", va: Any = "center"
        ) -> None:
            axes.text(x, y, text, fontsize=size, color=colour, ha=ha, va=va, linespacing=1.25, parse_math=False)

        write(MARGIN, MARGIN + 14, title, 12, INK)
        for i, line in enumerate(about):
            write(MARGIN, MARGIN + 50 + 24 * i, line, 7.5, SOFT)
        for x, column in zip(at, preview.columns, strict=True):
            write(x + w / 2, top - 13, column, 8, SOFT, "center", "baseline")
        y = top
        for i, (label, remark, images, texts) in enumerate(rows):
            if i == len(preview.rows):
                write(left, y + 22, "from mixed batches, with their labels", 8, SOFT)
                y += 44
            write(left - 18, y + h / 2 - 12, label, 8.5, INK, "right")
            write(left - 18, y + h / 2 + 14, remark, 6.5, SOFT, "right")
            for j, (x, image) in enumerate(zip(at, images, strict=False)):  # a small batch has fewer
                axes.imshow(_fit(image), extent=(x, x + w, y + h, y), aspect="auto", interpolation="nearest")
                axes.plot([x, x + w, x + w, x, x], [y, y, y + h, y + h, y], color=LINE, linewidth=0.5)
                if texts:
                    write(x + w / 2, y + h + 6, texts[j], 7, INK, "center", "top")
            y += h + GAP + 26 * _lines(texts)
        _save(figure, path, kind)


def _fit(image: np.ndarray) -> np.ndarray:
    """(H, W, 1 or 3) -> RGB with its longer side near SIDE: whole multiples of small images, so that pixels show."""
    from PIL import Image

    if image.shape[2] == 1:
        image = image.repeat(3, axis=2)
    longer = max(image.shape[:2])
    if times := SIDE // longer if longer <= SIDE // 2 else 0:
        return image.repeat(times, axis=0).repeat(times, axis=1)
    h, w = (max(round(side * SIDE / longer), 1) for side in image.shape[:2])
    return np.asarray(Image.fromarray(image).resize((w, h), Image.Resampling.LANCZOS))


def _cut(text: str, most: float) -> str:
    return cut(printable(text), most)


def _captions(labels: list[Parts]) -> list[str]:
    """cat 0.70 + dog 0.30; on two lines for all if one is too long for its image."""
    most = 15  # what fits below an image
    captions = [" + ".join(_share(part, parts) for part in parts) for parts in labels]
    if all(ems(text) <= most for text in captions):
        return captions
    return ["\n+ ".join(_share(part, parts, most - 4) for part in parts) for parts in labels]


def _share(part: tuple[str, float], parts: Parts, most: float = 100) -> str:
    name, share = part
    return f"{_cut(name, most)} {share:.2f}" if len(parts) > 1 else _cut(name, most)


def _lines(texts: list[str]) -> int:
    return max((text.count("\n") + 1 for text in texts), default=0)
