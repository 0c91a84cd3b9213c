"""What a user can cause and mend. The command line shows it in one line; anything else is a bug, with a traceback.

Every message says what was found, what was expected and what to do. All are ValueErrors, so that callers who do not
care which one it is can catch that.
"""

from __future__ import annotations

from vitlab.printable import one_line

LONGEST = 2000  # characters of a message that quotes a file


class VitlabError(ValueError):
    """The base of all errors below."""


class UsageError(VitlabError):
    """An argument, an option or a config that is not valid, or that this model cannot do."""


class CheckpointError(VitlabError):
    """Weights or a checkpoint folder that cannot be read, written or converted.

    A message quotes names out of the file, so it is made one printable line of a sane length.
    """

    def __init__(self, message: str):
        super().__init__(one_line(message if len(message) <= LONGEST else f"{message[: LONGEST - 4]} ..."))


class DataError(VitlabError):
    """A dataset that cannot be used: a folder, an archive, a table or captions."""


class ImageError(VitlabError):
    """A file that cannot be used as an image; the message names it and says why, and then what to do, if anything."""

    def __init__(self, why: str, remedy: str = ""):
        super().__init__(why, remedy)  # both, so that it pickles
        self.why, self.remedy = why, remedy

    def __str__(self) -> str:
        return f"{self.why} {self.remedy}".rstrip()


class TokenizerError(VitlabError):
    """A tokenizer file that cannot be used, or text that it cannot encode."""


class TrainingError(VitlabError):
    """A recipe that does not fit its model or data, or a run that cannot start, continue or resume."""


class ExportError(VitlabError):
    """A model that cannot be exported, or an exported file that cannot be opened."""


class SearchError(VitlabError):
    """An image index that cannot be read, written or searched."""
