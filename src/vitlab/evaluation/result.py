"""What an evaluation measured, as plain values for JSON and as tables for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from vitlab.tables import Table, Tabular
from vitlab.training.dense_scores import RegionScores
from vitlab.training.evaluate import Scores
from vitlab.training.retrieval import AT, Retrieval
from vitlab.training.target_scores import LabelScores, TargetScores

FIGURES = {  # of several labels an image, of a number, and of masks and boxes: title and format
    "miou": ("mIoU", ".2%"),
    "pixel_accuracy": ("pixel accuracy", ".2%"),
    "ap": ("AP", ".2%"),
    "ap50": ("AP50", ".2%"),
    "ap75": ("AP75", ".2%"),
    "pq": ("PQ", ".2%"),
    "map": ("mAP", ".2%"),
    "f1_micro": ("F1 (micro)", ".2%"),
    "f1_macro": ("F1 (macro)", ".2%"),
    "mae": ("MAE", ".6g"),
    "rmse": ("RMSE", ".6g"),
    "r2": ("R2", ".4f"),
}
DIRECTIONS = {"image_to_text": "image -> caption", "text_to_image": "caption -> image"}
CLASSES, PAIRS, UNREADABLE = 40, 10, 10  # rows that are shown; JSON has all


@dataclass(frozen=True)
class FewShot:
    """Accuracy of a classifier on the features of `shots` images of each class, for several draws of them."""

    shots: int
    draws: list[float]

    def to_dict(self) -> dict[str, Any]:
        return {
            "shots": self.shots,
            "mean": mean(self.draws),
            "deviation": stdev(self.draws),
            "draws": self.draws,
        }


@dataclass(frozen=True)
class Templates:
    """The sentences of a zero-shot evaluation."""

    list: str | None  # the name of a list of text/templates.py
    sentences: list[str]
    learned_from: int | None  # how many of them the model was trained on; None: not known

    def __str__(self) -> str:
        """7 templates of held_out, none of them learned from: 'a photo of a {}', ..."""
        first, *more = self.sentences
        number = f"{len(more) + 1} templates" if more else "1 template"
        of = f" of {self.list}" if self.list else ""
        trained = "" if self.learned_from is None else f", {self.learned_from or 'none'} of them learned from"
        return f"{number}{of}{trained}: {first!r}{', ...' if more else ''}"


@dataclass
class Evaluation(Tabular):
    """What `evaluate` measured; None where something was not measured."""

    checkpoint: str
    data: str
    split: str
    classes: list[str]
    reducer: str | None = None
    scores: Scores | TargetScores | RegionScores | None = None  # of its classes, labels or number; masks or boxes
    retrieval: Retrieval | None = None
    templates: Templates | None = None
    knn: float | None = None
    linear_probe: float | None = None
    few_shot: FewShot | None = None
    skipped: dict[str, str] = field(default_factory=dict)  # images that could not be read: name -> what is wrong
    notes: list[str] = field(default_factory=list)

    @property
    def confused(self) -> list[dict[str, Any]]:
        """Every kind of mistake, the most frequent first."""
        pairs = self.scores.confused() if isinstance(self.scores, Scores) else []
        return [{"truth": self.classes[i], "answer": self.classes[j], "images": count} for i, j, count in pairs]

    def to_dict(self) -> dict[str, Any]:
        """As `vitlab eval --json` prints it."""
        values: dict[str, Any] = {"checkpoint": self.checkpoint, "data": self.data, "split": self.split}
        values |= {"reducer": self.reducer, "classes": self.classes}
        if self.retrieval is not None:
            values |= self.retrieval.to_dict()
        if self.scores is not None:
            values |= self.scores.to_dict()
        if self.templates is not None:
            values["templates"] = vars(self.templates)
        if isinstance(self.scores, Scores):
            values["confused"] = self.confused
        values |= {} if self.knn is None else {"knn": self.knn}
        values |= {} if self.linear_probe is None else {"linear_probe": self.linear_probe}
        values |= {} if self.few_shot is None else {"few_shot": self.few_shot.to_dict()}
        return values | {"unreadable": len(self.skipped), "unreadable_pictures": list(self.skipped.values())}

    def tables(self) -> list[Table]:
        """All that was measured; then recall of captions, classes and mistakes, or labels: the worst of many."""
        parts = [_summary(self)]
        if self.retrieval is not None:
            parts.append(_recalls(self.retrieval))
        if isinstance(self.scores, Scores):
            parts += _classes(self, self.scores)
        if isinstance(self.scores, LabelScores):
            parts.append(_labels(self, self.scores))
        if isinstance(self.scores, RegionScores):
            parts.append(_regions(self.scores))
        return parts


def _summary(result: Evaluation) -> Table:
    scores, retrieval, few = result.scores, result.retrieval, result.few_shot
    rows: list[tuple[str, str]] = []
    if result.templates is not None:
        rows.append(("zero-shot", str(result.templates)))
    if isinstance(scores, Scores):
        rows.append(("top-1", f"{scores.top(1):.2%}"))
        rows += [("top-5", f"{scores.top(5):.2%}")] * (len(result.classes) > 5)
    rows += [] if result.knn is None else [("k-NN on features", f"{result.knn:.2%}")]
    rows += [] if result.linear_probe is None else [("linear probe", f"{result.linear_probe:.2%}")]
    if isinstance(scores, TargetScores | RegionScores):
        numbers = scores.numbers()
        rows += [(name, format(numbers[key], form)) for key, (name, form) in FIGURES.items() if key in numbers]
    if few is not None:
        spread = f"+- {stdev(few.draws):.2%} over {len(few.draws)} draws"
        rows.append((f"{few.shots} labels a class", f"{mean(few.draws):.2%} {spread}"))
    if isinstance(scores, Scores):
        rows += [("loss", f"{scores.loss():.4f}"), ("calibration (ECE)", f"{scores.calibration_error():.4f}")]
    if scores is not None:
        images = f"{int(scores.read.sum())} images in {scores.seconds:.1f} s, reading included"
        rows.append(("speed", f"{len(scores.read) / max(scores.seconds, 1e-9):.0f} images/s, {images}"))
    if retrieval is not None:
        values = retrieval.to_dict()
        rows.append(("mean recall", f"{retrieval.mean_recall():.2%}"))
        counts = f"{values['images']} images and {values['captions']} captions"
        rows.append(("speed", f"{counts} in {retrieval.seconds:.1f} s, reading included"))
    rows += [("unreadable", reason) for reason in list(result.skipped.values())[:UNREADABLE]]
    if (more := len(result.skipped) - UNREADABLE) > 0:
        rows.append(("", f"and {more} more (--json names all)"))
    reducer = "" if result.reducer is None else f", with {result.reducer}"
    heading = f"{result.checkpoint} on {result.data}, {result.split} split{reducer}"
    return Table(["", ""], rows, heading=[heading], prose=("",))


def _recalls(retrieval: Retrieval) -> Table:
    titles = [title for k in AT for title in (f"recall@{k}", "chance")]
    rows = []
    for way, name in DIRECTIONS.items():
        pairs = ((retrieval.recall(k)[way], retrieval.chance(k)[way]) for k in AT)
        rows.append([name, *(f"{share:.2%}" for pair in pairs for share in pair)])
    return Table(["", *titles], rows, titles)


def _classes(result: Evaluation, scores: Scores) -> list[Table]:
    """Accuracy of each class, or of the worst of many; and the pairs of classes that are confused most often."""
    accuracies, totals, heading = scores.per_class(), scores.confusion().sum(axis=1).tolist(), []
    numbers = list(range(len(accuracies)))
    if len(accuracies) > CLASSES:
        numbers = sorted((i for i in numbers if totals[i]), key=lambda i: accuracies[i] or 0.0)[:CLASSES]
        heading = [f"The {len(numbers)} worst of {len(accuracies)} classes (--json has all)"]
    rows = [[result.classes[i], _percent(accuracies[i]), str(totals[i])] for i in numbers]
    tables = [Table(["class", "right", "images"], rows, ("right", "images"), heading)]
    if pairs := result.confused[:PAIRS]:
        rows = [[pair["truth"], pair["answer"], str(pair["images"])] for pair in pairs]
        tables.append(Table(["most often taken", "for", "images"], rows, ("images",)))
    return tables


def _labels(result: Evaluation, scores: LabelScores) -> Table:
    """Figures of each label, or of the worst of many."""
    labels, heading = list(zip(result.classes, scores.to_dict()["per_label"], strict=True)), []
    if len(labels) > CLASSES:
        scored = [row for row in labels if row[1]["average_precision"] is not None]
        labels = sorted(scored, key=lambda row: row[1]["average_precision"])[:CLASSES]
        heading = [f"The {len(labels)} worst of {len(result.classes)} labels (--json has all)"]
    rows = []
    for label, figures in labels:
        shares = [_percent(figures["average_precision"]), _percent(figures["f1"])]
        rows.append([label, *shares, f"{figures['threshold']:.3f}", str(figures["images"])])
    right = ("average precision", "F1", "threshold", "images")
    return Table(["label", *right], rows, right, heading)


def _regions(scores: RegionScores) -> Table:
    """Figures of each class, or of the worst of many."""
    rows, heading = scores.per_class(), []
    names = [name for name in rows[0] if name != "class"] if rows else []
    if len(rows) > CLASSES:
        scored = [row for row in rows if row[names[0]] is not None]
        heading = [f"The {min(CLASSES, len(scored))} worst of {len(rows)} classes (--json has all)"]
        rows = sorted(scored, key=lambda row: row[names[0]])[:CLASSES]
    titles = [{"iou": "IoU"}.get(name, name.upper()) for name in names]
    cells = [[row["class"], *(_percent(row[name]) for name in names)] for row in rows]
    return Table(["class", *titles], cells, titles, heading)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
