"""vitlab.push: a model to a repository on the Hugging Face hub, with a model card made from its own facts.

push("runs/flowers/best", "me/flowers")                       # vitlab's own folder
push("runs/flowers/best", "me/flowers-hf", to="hf")           # for transformers
push("runs/flowers/best", "me/flowers", dry_run=True).card    # nothing is sent
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from vitlab.checkpoints import hub
from vitlab.checkpoints.convert import TARGETS, write
from vitlab.checkpoints.files import SUFFIXES
from vitlab.checkpoints.load import ModelOrName, load_with_report
from vitlab.checkpoints.model_card import LIBRARIES, is_ours, model_card
from vitlab.errors import CheckpointError, UsageError
from vitlab.models.base import Capability, unwrap
from vitlab.version import __version__

README = "README.md"


@dataclass(frozen=True)
class Pushed:
    """What was uploaded, or with dry_run=True would be."""

    url: str
    files: dict[str, int]  # name -> bytes
    card: str  # the text of README.md
    notes: list[str]
    uploaded: bool


def push(
    source: ModelOrName,
    name: str,
    *,
    to: str = "native",
    private: bool = False,
    message: str | None = None,
    dry_run: bool = False,
    **load_options: Any,
) -> Pushed:
    """Upload a model, or the checkpoint of this name or path, to the repository `name` ("owner/name") on the hub.

    The repository is made if it is not there. `to` is the layout, as for `convert`; `private` makes a private
    repository; `message` is the commit's; `dry_run` writes everything but sends nothing; further options are `load`'s.
    """
    name = _check_name(name)
    _check_layout(to)
    if not dry_run:
        _check_access(name)
    if isinstance(source, str | PathLike):
        model, report = load_with_report(fspath(source), **load_options)
        notes = report.notes
    else:
        model, notes = unwrap(source), list[str]()
    if Capability.TEXT in model.capabilities and model.tokenizer is None:
        notes.append("it has no tokenizer: whoever loads it cannot read text. Add it with vitlab convert --tokenizer.")
    if model.card is None or not model.card.licence:
        notes.append("its licence is not stated, so the model card states none. Add it to README.md on the hub.")
    with tempfile.TemporaryDirectory(prefix="vitlab_push_") as temporary:
        folder = Path(temporary)
        notes += write(model, folder, to)
        card = model_card(model, name, to, folder)
        (folder / README).write_text(card, encoding="utf-8")
        if not dry_run:
            message = message or f"{model.family} in {LIBRARIES[to]}'s layout, by vitlab {__version__}"
            notes += _upload(folder, name, private, message)
        files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    return Pushed(f"{_endpoint()}/{name}", files, card, notes, uploaded=not dry_run)


def _check_name(name: str) -> str:
    """owner/name, as the hub takes it."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    name = name.removeprefix(hub.PREFIX)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII):
        hint = f"me/{name}" if re.fullmatch(r"[\w.-]+", name, re.ASCII) else "me/flowers"
        raise UsageError(f"{name!r} is not a repository's name: expected OWNER/NAME, e.g. {hint}.")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(f"{name!r} is not a name that the hub can have: {error}") from None
    return name


def _check_layout(to: str) -> None:
    if to not in LIBRARIES:
        one_file = f"--to {to} writes one file, not a folder" if to in TARGETS else f"--to {to!r} is not known"
        raise UsageError(f"{one_file}: to push, use {', '.join(LIBRARIES)}.")


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _check_access(name: str) -> None:
    """Before a large model is loaded and written in vain."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UsageError(f"{name}: HF_HUB_OFFLINE is set, so nothing is uploaded. Unset it, or use --dry-run.")
    if get_token() is None:
        raise UsageError(
            f"{name}: no token for {_endpoint()}. Make one with write access at {_endpoint()}/settings/tokens, then "
            "run `hf auth login` or set HF_TOKEN. --dry-run needs none."
        )


def _upload(folder: Path, name: str, private: bool, message: str) -> list[str]:
    """Create the repository, if need be, and make one commit of the folder."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api, notes = HfApi(), list[str]()
    with _hub_errors(name):
        try:
            info = api.model_info(name)
        except RepositoryNotFoundError:
            api.create_repo(name, private=private, exist_ok=True)
        else:
            if private and not info.private:
                raise UsageError(
                    f"{name}: is there already, and public. Make it private on its page, or leave out --private."
                )
            there = {file.rfilename for file in info.siblings or ()}
            _check_leftovers(name, there, {file.name for file in folder.iterdir()})
            if README in there and not is_ours(_read_readme(name)):
                (folder / README).unlink()
                notes.append("its README.md was written by hand: it was kept.")
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    return notes


def _read_readme(name: str) -> str:
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType]

    return Path(hf_hub_download(name, README)).read_text(encoding="utf-8", errors="replace")


def _check_leftovers(name: str, there: set[str], written: set[str]) -> None:
    """Weights or a config of another layout beside ours would be loaded in their place."""
    kept = {file for file in there - written if Path(file).suffix in SUFFIXES or file.endswith("config.json")}
    kept |= {"model.json"} & (there - written)
    if kept := {file for file in kept if "/" not in file}:
        raise CheckpointError(
            f"{name}: already holds {', '.join(sorted(kept))}, of another layout. Push to another name, delete them on "
            "its page, or use the same --to as before."
        )


@contextmanager
def _hub_errors(name: str) -> Generator[None]:
    """What the hub or the network refuses, with what to do."""
    from huggingface_hub.errors import HfHubHTTPError

    owner, where = name.split("/")[0], _endpoint()
    try:
        yield
    except (UsageError, CheckpointError):
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            what = "does not accept the token. Log in again with `hf auth login`, or set HF_TOKEN to a valid one."
        elif status == 403:
            what = f"does not let this token write there. Take one with write access to {owner}, or another owner."
        else:
            what = (
                f"answered {status} ({_first_line(error)}). Run it again later, or use --dry-run to look at the files."
            )
        raise CheckpointError(f"{name}: {where} {what}") from None
    except Exception as error:  # of the connection: httpx's errors or requests', by huggingface_hub's version
        raise CheckpointError(
            f"{name}: {where} cannot be reached, or the upload broke off ({_first_line(error)}). Check the network, "
            "and run it again: what arrived is not sent twice."
        ) from None


def _first_line(error: BaseException) -> str:
    text = str(error.__cause__ or error) or type(error).__name__
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__).rstrip(".")
