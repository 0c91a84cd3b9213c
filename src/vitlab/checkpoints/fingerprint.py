"""A short text that two models share only if they make the same of every picture and text."""

from __future__ import annotations

import hashlib
import json

import torch

from vitlab.models.base import Network


def fingerprint(model: Network) -> str:
    """Equal for models that make the same of every picture and text: their network, preprocess, words and weights."""
    about = [model.family, model.config.to_dict(), None if model.preprocess is None else model.preprocess.to_dict()]
    tokenizer = getattr(model, "tokenizer", None)
    about.append(None if tokenizer is None else tokenizer.to_json())
    digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16)
    for key, value in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # numpy has no bfloat16
    return digest.hexdigest()
