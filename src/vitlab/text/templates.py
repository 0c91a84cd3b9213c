"""Class names and the sentences around them, for training a CLIP on classes and for zero-shot classification.

    templates = read_templates("held_out")             # or a file, or "a photo of a {}|a sketch of a {}"
    weights = clip.class_embeddings(class_prompts(["cat", "dog"], templates))      # (K, E), of unit length

No sentence of `held_out` is in `train`, so a model trained on one list is evaluated on sentences it has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from vitlab.errors import UsageError

LISTS = {
    "train": (
        "a {}",
        "the {}",
        "one {}",
        "this is a {}",
        "that is the {}",
        "it is a {}",
        "here is a {}",
        "a photo of a {}",
        "a photo of the {}",
        "a good photo of a {}",
        "a bad photo of a {}",
        "a small photo of a {}",
        "a large photo of the {}",
        "a dark photo of a {}",
        "a bright photo of the {}",
        "a picture of a {}",
        "a small picture of the {}",
        "a clean picture of a {}",
        "a picture with a {} in it",
        "a {} in a picture",
        "there is a {} in this photo",
        "we can see a {} here",
        "i see the {}",
        "something that looks like a {}",
    ),
    "held_out": (
        "an image of a {}",
        "a blurry photo of the {}",
        "a low resolution picture of a {}",
        "look, a {}",
        "what you see here is a {}",
        "a cropped photo with a {}",
        "my favourite picture of the {}",
    ),
}
HELP = 'write "a photo of a {}", several joined by |, or name a file with one a line'


def read_templates(source: str) -> list[str]:
    """By the name of a list, from a text file, or as they are written; each has a {} for the class."""
    if source in LISTS:
        return list(LISTS[source])
    if "{}" in source:
        templates = [part.strip() for part in source.split("|") if part.strip()]
    elif (path := Path(source).expanduser()).is_file():
        templates = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    else:
        near = get_close_matches(source, LISTS, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"templates {source!r}: no such list or file.{hint} Lists: {', '.join(LISTS)}; or {HELP}.")
    for template in templates:
        if template.count("{}") != 1:
            raise UsageError(f"template {template!r} must hold {{}} once, where the class goes: {HELP}.")
    if not templates:
        raise UsageError(f"{source}: no templates in it: {HELP}.")
    return templates


def read_labels(source: str) -> list[str]:
    """cat,dog; or from a text file with one label a line."""
    path, remedy = Path(source).expanduser(), "Write cat,dog, or name a file with one label a line."
    if not path.is_file() and "," not in source and (path.suffix == ".txt" or len(path.parts) > 1):
        raise UsageError(f"--labels {source}: no such file. {remedy}")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines() if path.is_file() else source.split(",")
    except UnicodeDecodeError:
        raise UsageError(f"--labels {source}: is no text. {remedy}") from None
    names = [name.strip() for name in lines if name.strip()]
    if not names:
        raise UsageError(f"--labels {source!r} names nothing. {remedy}")
    return names


def fill(template: str, label: str) -> str:
    """ "a {}", "polar_bear" -> "a polar bear"."""
    return template.replace("{}", " ".join(label.replace("_", " ").split()))


def class_prompts(labels: Sequence[str], templates: Sequence[str]) -> list[list[str]]:
    """For each label its sentences: one from each template."""
    if not labels or not all(label.strip() for label in labels):
        raise UsageError("labels must not be empty: name what may be in the images, e.g. cat,dog.")
    return [[fill(template, label) for template in templates] for label in labels]
