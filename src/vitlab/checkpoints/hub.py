"""hf-hub:owner/name[@revision] -> a local folder, by huggingface_hub: downloads resume, and its cache works offline."""

from __future__ import annotations

import os
import re
from pathlib import Path

from vitlab.checkpoints.hub_models import BY_NAME, HUB_MODELS
from vitlab.errors import CheckpointError
from vitlab.models.base import Card

PREFIX = "hf-hub:"
FIRST = ["*.json", "*.safetensors", "merges.txt", "spiece.model", "tokenizer.model"]  # the last three: tokenizers
BELOW = ["*/*"]  # onnx/, openvino/ and the like: loading reads the top folder
SECOND = ["*.npz", "*.pth", "*.pt", "*.bin"]  # only where there is no safetensors file


def fetch(name: str) -> Path:
    """Download what loading needs (or find it in the cache) and return its folder."""
    from huggingface_hub import constants, snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name.removeprefix(PREFIX))
    if match is None:
        raise CheckpointError(f"{name}: expected {PREFIX}owner/name or {PREFIX}owner/name@revision.")
    repo, revision = match[1], match[2]
    where = os.environ.get("HF_ENDPOINT") or "the Hugging Face hub"
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=FIRST, ignore_patterns=BELOW))
        if not list(folder.glob("*.safetensors")):
            every = FIRST + SECOND
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=every, ignore_patterns=BELOW))
    except GatedRepoError:
        raise CheckpointError(
            f"{name}: is gated: its owner gives access to those who accept the licence. Log in and accept it at "
            f"{constants.ENDPOINT}/{repo} (access may take a while), then run `hf auth login` or set HF_TOKEN, and "
            f"load it again.{_open_sibling(repo)}"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{name}: {where} has no revision {revision!r} of it. Leave @revision out.") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{name}: {where} has no such model, or it is private. Check the name, or log in with `hf auth login`."
        ) from None
    except HFValidationError as error:
        raise CheckpointError(f"{name}: is not a name that the Hugging Face hub can have: {error}") from None
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            why, connect = "HF_HUB_OFFLINE is set", "Unset HF_HUB_OFFLINE"
        else:
            why, connect = f"{where} cannot be reached{_reason(error.__cause__)}", "Connect to the network"
        raise CheckpointError(
            f"{name}: not wholly in the local cache, and {why}. {connect}, set HF_ENDPOINT to a mirror, or copy the "
            "model's folder here and load it by its path."
        ) from None
    except Exception as error:  # a connection that broke off: httpx's errors or requests', by huggingface_hub's version
        raise CheckpointError(
            f"{name}: the download from {where} broke off{_reason(error)}. Run it again: the files that arrived whole "
            "are kept."
        ) from None
    return folder


def card_of(source: str) -> Card | None:
    """Where a model of the hub comes from, with its licence where the table knows it; None: it is not on the hub."""
    if not source.startswith(PREFIX):
        return None
    model = BY_NAME.get(source.removeprefix(PREFIX).split("@")[0])
    return Card(source=source, licence=model.licence if model is not None else None)


def _open_sibling(repo: str) -> str:
    """A model of the same family that needs no access, where one is known."""
    gated = BY_NAME.get(repo)
    open_ones = [model for model in HUB_MODELS if gated and model.family == gated.family and not model.gated]
    return f" Without access: {PREFIX}{open_ones[0].name} is of the same family." if open_ones else ""


def _reason(error: BaseException | None) -> str:
    """The first line of an error, in brackets."""
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip()]
    return f" ({lines[0].rstrip('.')})" if lines else ""
