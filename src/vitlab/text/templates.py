"""Sentences around a class name, for training on classes and for telling pictures apart by words alone (zero-shot).

    templates = read_templates("held_out")             # or a file, or "a photo of a {}|a sketch of a {}"
    weights = class_embeddings(model, ["cat", "dog"], templates)      # (K, E), of unit length

A class is the mean of its sentences (prompt ensembling, section 3.1.4 of CLIP, arXiv:2103.00020). No sentence of
`held_out` stands in `train`, so a model trained on the one is judged on sentences it has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import TokenizerError
from vitlab.models.base import Capability, Network
from vitlab.text.tokenizer import its_tokenizer

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


def read_templates(what: str) -> list[str]:
    """By the name of a list, from a text file, or as they are written; each has a {} for the class."""
    if what in LISTS:
        return list(LISTS[what])
    if "{}" in what:
        found = [part.strip() for part in what.split("|") if part.strip()]
    elif (path := Path(what).expanduser()).is_file():
        found = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    else:
        near = get_close_matches(what, LISTS, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise TokenizerError(f"templates {what!r}: no such list or file.{hint} Lists: {', '.join(LISTS)}; or {HELP}.")
    for template in found:
        if template.count("{}") != 1:
            raise TokenizerError(f"template {template!r} must hold {{}} once, where the class goes: {HELP}.")
    if not found:
        raise TokenizerError(f"{what}: no templates in it: {HELP}.")
    return found


def fill(template: str, label: str) -> str:
    """ "a {}", "polar_bear" -> "a polar bear"."""
    return template.replace("{}", " ".join(label.replace("_", " ").split()))


def class_embeddings(model: Network, labels: Sequence[str], templates: Sequence[str]) -> Tensor:
    """(K, E): for each label the mean of its sentences' embeddings, made of unit length again."""
    if Capability.TEXT not in model.capabilities:
        raise TokenizerError(f"a model of the family {model.family} reads no words: this needs a CLIP.")
    tokenizer = its_tokenizer(model)
    if not labels or not all(label.strip() for label in labels):
        raise TokenizerError("labels must not be empty: name what may be in the pictures, e.g. cat,dog.")
    device, found = next(model.parameters()).device, []
    with torch.no_grad():
        for label in labels:
            ids = tokenizer([fill(template, label) for template in templates]).to(device)
            found.append(model.encode_text(ids).float().mean(dim=0))  # (E,)
    return F.normalize(torch.stack(found), dim=1)
