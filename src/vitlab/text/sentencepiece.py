"""sentencepiece models (spiece.model) as a backend of the `tokenizers` library, cleaned as SigLIP does it.

    backend = read_sentencepiece(Path("spiece.model"))     # lower case, no punctuation; ids as in transformers

The file is a protocol buffer: pieces with their scores, the kind of model, and a table that normalises characters. The
few fields that count are read here (sentencepiece_model.proto of google/sentencepiece numbers them).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, normalizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram

from vitlab.errors import TokenizerError
from vitlab.text.siglip import SPACE, cleaning, one_space

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of pieces
UNIGRAM, PAIRS = 1, 2  # kinds of models


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    pieces: list[Piece]
    kind: int = UNIGRAM
    byte_fallback: bool = False
    space_is_suffix: bool = False
    characters: bytes = b""  # a compiled table: what a character becomes
    one_space: bool = True  # several spaces become one
    escaped: bool = True  # spaces become U+2581
    space_first: bool = True  # every text begins with a space


def read_sentencepiece(
    path: Path, *, lower: bool = True, end: str = "</s>", unknown: str = "<unk>", padding: str = "</s>"
) -> Backend:
    """SigLIP's tokenizer of a sentencepiece model. PieceEncoder in siglip.py gives its numbers."""
    model = parse(path.read_bytes())
    wrong = {
        "treat_whitespace_as_suffix": model.space_is_suffix,
        "escape_whitespaces=false": not model.escaped,
        "unused pieces": any(piece.kind == UNUSED for piece in model.pieces),
        "pieces that a user defined": any(piece.kind == USER_DEFINED for piece in model.pieces),
        f"model_type {model.kind}": model.kind not in (UNIGRAM, PAIRS),
    }
    if any(wrong.values()):
        raise TokenizerError(f"has {next(name for name, is_so in wrong.items() if is_so)}, which is not known here.")
    backend = Backend(_unigram(model) if model.kind == UNIGRAM else _pairs(model, unknown))
    end_id = backend.token_to_id(end)
    if end_id is None:
        raise TokenizerError(f"has no {end}, which ends a text.")
    backend.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [
            *cleaning(lower),
            normalizers.Prepend(SPACE),  # before the table, which may make it a space like any other
            *([normalizers.Precompiled(model.characters)] if model.characters else []),
            *(one_space() if model.one_space else []),
            normalizers.Replace(" ", SPACE),
        ]
    )
    scheme = "always" if model.space_first else "never"
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)  # type: ignore[assignment]
    has_padding = padding not in (end, unknown) and backend.token_to_id(padding) is not None
    special = [end, unknown, padding] if has_padding else [end, unknown]
    backend.add_special_tokens(
        [AddedToken(token, lstrip=True, rstrip=True, normalized=False, special=True) for token in special]
    )
    backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"$A {end}", special_tokens=[(end, end_id)]
    )
    return backend


def _unigram(model: SentencePieceModel) -> Unigram:
    """The most probable pieces (arXiv:1804.10959)."""
    unknown = next((n for n, piece in enumerate(model.pieces) if piece.kind == UNKNOWN), None)
    return Unigram(
        [(piece.text, piece.score) for piece in model.pieces], unk_id=unknown, byte_fallback=model.byte_fallback
    )


def _pairs(model: SentencePieceModel, unknown: str) -> BPE:
    """Byte pairs: two pieces are merged where the result is a piece; the highest score comes first."""
    ids = {piece.text: number for number, piece in enumerate(model.pieces)}
    normal = [piece for piece in model.pieces if piece.kind == NORMAL and len(piece.text) > 1]
    merges = [
        (piece.text[:cut], piece.text[cut:])
        for piece in sorted(normal, key=lambda piece: -piece.score)
        for cut in range(1, len(piece.text))
        if piece.text[:cut] in ids and piece.text[cut:] in ids
    ]
    return BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)


# ---- the file


def parse(data: bytes) -> SentencePieceModel:
    """The fields of a ModelProto that say how a text is cut."""
    try:
        fields = list(_fields(data))
        pieces = [_piece(dict(_fields(value))) for number, value in fields if number == 1]
        trainer, normalizer = (
            {number: value for part, message in fields if part == which for number, value in _fields(message)}
            for which in (2, 3)
        )
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, KeyError):
        raise TokenizerError("is no sentencepiece model. Fetch it again.") from None
    if not pieces:
        raise TokenizerError("is no sentencepiece model: it has no pieces. Fetch it again.")
    return SentencePieceModel(
        pieces,
        kind=trainer.get(3, UNIGRAM),
        byte_fallback=bool(trainer.get(35, False)),
        space_is_suffix=bool(trainer.get(24, False)),
        characters=normalizer.get(2, b""),
        one_space=bool(normalizer.get(4, True)),
        escaped=bool(normalizer.get(5, True)),
        space_first=bool(normalizer.get(3, True)),
    )


def _piece(fields: dict[int, Any]) -> Piece:
    return Piece(fields[1].decode(), struct.unpack("<f", fields.get(2, b"\0" * 4))[0], fields.get(3, NORMAL))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """A protocol buffer's fields: (number, value). Whole numbers as int, all else as bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if length is None and kind == 2:
            length, at = _varint(message, at)
        if length is None or at + length > len(message):
            raise IndexError("a field ends after the file")
        yield number, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Seven bits a byte, the lowest first; the eighth says that another byte follows."""
    value = shift = 0
    while message[at] & 0x80:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1
