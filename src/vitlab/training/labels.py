"""Matches the class names of a model and its data; their order may differ."""

from __future__ import annotations

from vitlab.images.datasets import first_few


def class_order(labels: list[str], classes: list[str]) -> list[int] | None:
    """For each class of the data, the model's output that stands for it; None where the two name different classes."""
    if sorted(labels) != sorted(classes):
        return None
    places = {label: i for i, label in enumerate(labels)}
    return [places[name] for name in classes]


def differing(ours: list[str], theirs: list[str], we: str, they: str) -> str:
    """A sentence on the classes that only one side has."""
    parts = []
    for who, mine, others in ((we, ours, set(theirs)), (they, theirs, set(ours))):
        if only := [name for name in mine if name not in others]:
            parts.append(f"only {who} has {first_few(only)}")
    return "; ".join(parts) or "the same names in another order"
