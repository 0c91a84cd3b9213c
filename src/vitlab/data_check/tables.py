"""The result of a check as tables: the first of each kind of problem. The page shows more, JSON all."""

from __future__ import annotations

from collections.abc import Sized

from vitlab.data_check.result import CheckResult, shown_kind
from vitlab.tables import Table, count

SHOWN = 5  # of each kind of problem


def check_tables(result: CheckResult) -> list[Table]:
    """What makes results wrong first; last how many there are of each other kind."""
    splits = ", ".join(f"{split} {count(n)}" for split, n in result.splits.items())
    classes = f"{len(result.classes) or 'no'} {'classes' if result.kind == 'class' else 'labels'}"
    if result.kind == "number":
        classes = f"a number for each image ({result.classes[0]})"
    heading = f"{result.name}: {count(len(result.images))} images ({splits}), {classes}"
    return [
        Table([], [], heading=[heading]),
        *_serious(result),
        *_suspects(result),
        *_doubtful(result),
        _counts(result),
    ]


def _serious(result: CheckResult) -> list[Table]:
    tables = []
    for title, pairs in (("in two splits", result.leaks), ("copies with different labels", result.conflicts)):
        rows = []
        for copy in pairs[:SHOWN]:
            a, b = result.images[copy.image], result.images[copy.of]
            rows.append([f"{a.path} ({a.label})", "=", f"{b.path} ({b.label})", shown_kind(copy)])
        if rows:
            tables.append(Table([""] * 4, rows, heading=[f"{title.upper()}: {count(len(pairs))}"], notes=_rest(pairs)))
    if result.unreadable:
        rows = [[error] for error in list(result.unreadable.values())[:SHOWN]]
        heading = f"UNREADABLE: {count(len(result.unreadable))}"
        tables.append(Table([""], rows, heading=[heading], notes=_rest(result.unreadable)))
    return tables


def _suspects(result: CheckResult) -> list[Table]:
    if not result.suspects:
        return []
    about = "" if result.wrong_labels is None else f" (about {result.wrong_labels:.1%} of all labels may be wrong)"
    rows = []
    for s in result.suspects[:SHOWN]:
        names = result.classes[s.given], result.classes[s.suggested]
        rows.append([result.images[s.image].path, *names, f"{s.confidence:.2f}"])
    heading = f"likely wrong labels: {count(len(result.suspects))}{about}"
    titles = ["image", "label", "suggested", "confidence"]
    return [Table(titles, rows, ("confidence",), [heading], notes=_rest(result.suspects))]


def _doubtful(result: CheckResult) -> list[Table]:
    if not result.doubtful:
        return []
    about = "" if result.wrong_labels is None else f" (about {result.wrong_labels:.1%} may be wrong)"
    rows = []
    for d in result.doubtful[:SHOWN]:
        info = result.images[d.image]
        rows.append([info.path, info.label or "", result.doubt(d), f"{d.confidence:.2f}"])
    heading = f"likely wrong labels, each by itself: {count(len(result.doubtful))}{about}"
    titles = ["image", "labels", "doubt", "confidence"]
    return [Table(titles, rows, ("confidence",), [heading], notes=_rest(result.doubtful))]


def _counts(result: CheckResult) -> Table:
    problems = {
        "copies within a split": result.duplicates,
        f"unlike {'their class' if result.kind == 'class' else 'the others'}": result.outliers,
        "tiny": result.tiny,
        "extreme shape": result.extreme,
        "blank": result.blank,
    }
    rows = [[title, count(len(images))] for title, images in problems.items()]
    if result.imbalance is not None:
        largest = "largest class" if result.kind == "class" else "most frequent label"
        rows.append([largest, f"{result.imbalance:.1f} times the smallest"])
    return Table(["", ""], [*rows, ["features", result.method.model]], prose=("",))


def _rest(items: Sized) -> list[str]:
    return [f"and {count(more)} more"] if (more := len(items) - SHOWN) > 0 else []
