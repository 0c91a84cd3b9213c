"""hf-hub:owner/name[@revision] -> a local folder, by huggingface_hub: downloads resume, and its cache works offline."""

from __future__ import annotations

import os
import re
from pathlib import Path

from vitlab.checkpoints.files import CheckpointError

PREFIX = "hf-hub:"
FIRST = ["*.json", "*.safetensors"]
SECOND = ["*.npz", "*.pth", "*.pt", "*.bin"]  # only where there is no safetensors file


def fetch(name: str) -> Path:
    """Download what loading needs (or find it in the cache) and return its folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name.removeprefix(PREFIX))
    if match is None:
        raise CheckpointError(f"{name}: expected {PREFIX}owner/name or {PREFIX}owner/name@revision.")
    repo, revision = match[1], match[2]
    endpoint = os.environ.get("HF_ENDPOINT")
    where = endpoint or "the Hugging Face hub"
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=FIRST))
        if not list(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=FIRST + SECOND))
    except GatedRepoError:
        raise CheckpointError(
            f"{name}: {where} asks you to accept its terms. Do so on the model's page, then `hf auth login`."
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{name}: {where} has no revision {revision!r} of it. Leave @revision out.") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{name}: {where} has no such model, or it is private. Check the name, or log in with `hf auth login`."
        ) from None
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"{name}: not in the local cache, and {where} cannot be reached. Connect to the network, set HF_ENDPOINT "
            "to a mirror, or copy the model's folder here and load it by its path."
        ) from None
    except (
        HfHubHTTPError,
        OSError,
        RuntimeError,
    ) as error:  # a connection that broke off
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{name}: the download from {where} broke off ({first}). Run the command again: what has arrived is kept."
        ) from None
    return folder
