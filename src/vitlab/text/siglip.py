"""SigLIP's texts as pieces of a sentencepiece model, number for number as transformers' SiglipTokenizer has them.

    encoder = PieceEncoder.of(backend)       # a tokenizer that `read_sentencepiece` made, or its tokenizer.json
    encoder.encode("A dog, running")         # [9, 4, 31, ..., 1], with the end-of-text

The normalizers of the `tokenizers` library come close and no further: they lower-case letter by letter, without the
final sigma, and look up grapheme clusters in the table of characters, where sentencepiece takes the longest prefix
(which tells stray combining marks and decomposed Hangul apart). So text is cleaned here, and the library cuts it.
"""

from __future__ import annotations

import json
import re
import struct
from base64 import b64decode
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Regex, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram

from vitlab.errors import TokenizerError

SPACE = "▁"  # U+2581 stands for a space
WHITESPACE = r"[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+"  # Python's \s
PUNCTUATION = r"[!-/:-@\[-`{-~]"  # Python's string.punctuation
NEVER = "\U0010ffff"  # no character
BYTE = re.compile("<0x[0-9A-F]{2}>")


def cleaning(lower: bool = True) -> list[Any]:
    """Lower case, no punctuation, one kind of space, none at the end: for programs that read tokenizer.json."""
    return [
        normalizers.Replace(SPACE, " "),
        *([normalizers.Lowercase()] if lower else []),
        normalizers.Replace(Regex(PUNCTUATION), ""),
        normalizers.Replace(Regex(WHITESPACE), " "),
        normalizers.Strip(left=False, right=True),
    ]


class CharacterMap:
    """What sentencepiece replaces before it cuts: a trie of UTF-8 strings, and what each becomes.

    The trie is a double array (https://github.com/s-yata/darts-clone): a unit's child by byte b is at offset ^ b.
    """

    def __init__(self, compiled: bytes) -> None:
        size = int.from_bytes(compiled[:4], "little")
        if not 4 <= size <= len(compiled) - 4:
            raise TokenizerError("has a damaged table of characters. Fetch it again.")
        self.units = struct.unpack_from(f"<{size // 4}I", compiled, 4)
        self.strings = compiled[4 + size :]  # each ends with a zero byte

    def __call__(self, text: str) -> str:
        """The longest prefix that the trie has is replaced, again and again; a character that begins none stays."""
        data, at, parts = text.encode(), 0, list[bytes]()
        while at < len(data):
            part, length = self._longest_prefix(data, at)
            parts.append(part)
            at += length
        return b"".join(parts).decode()

    def _longest_prefix(self, data: bytes, at: int) -> tuple[bytes, int]:
        """What the longest match at `at` becomes, and how many bytes it has."""
        units, node, value, length = self.units, _offset(self.units[0]), -1, 0
        for end in range(at, len(data)):
            node ^= data[end]
            if node >= len(units) or units[node] & 0x800000FF != data[end]:
                break
            has_value = units[node] >> 8 & 1
            node ^= _offset(units[node])
            if has_value:
                value, length = units[node] & 0x7FFFFFFF, end + 1 - at
        if value >= 0:
            return self.strings[value : self.strings.index(0, value)], length
        length = 1 + sum(data[at] >= least for least in (0xC0, 0xE0, 0xF0))  # of one character
        return data[at : at + length], length


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 0x200) >> 6)


@dataclass(frozen=True)
class PieceEncoder:
    """Does to a text what SiglipTokenizer does, with special tokens that somebody types and odd ends too."""

    backend: Backend
    cutter: BPE | Unigram
    end: str
    unknown: str
    lower: bool
    characters: CharacterMap | None
    one_space: bool  # several spaces become one
    space_first: bool  # sentencepiece begins every text with a space

    @classmethod
    def of(cls, backend: Backend, end: str) -> PieceEncoder | None:
        """None where the tokenizer does not clean a text as SigLIP does."""
        if backend.normalizer is None or backend.decoder is None:
            return None
        rows = _state(backend.normalizer).get("normalizers", [])
        lower = next((lower for lower in (True, False) if rows[: 4 + lower] == _rows(cleaning(lower))), None)
        if lower is None:
            return None
        table = next((b64decode(row["precompiled_charsmap"]) for row in rows if row["type"] == "Precompiled"), b"")
        model = _state(backend.model)
        return cls(
            backend,
            backend.model if "unk_token" in model else _without_reserved(model),
            end=end,
            unknown=model["unk_token"] if "unk_token" in model else model["vocab"][model["unk_id"]][0],
            lower=lower,
            characters=CharacterMap(table) if table else None,
            one_space=_rows(one_space())[0] in rows,
            space_first=_state(backend.decoder).get("prepend_scheme") != "never",
        )

    def encode(self, text: str, context: int | None = None) -> list[int]:
        """Numbers of the pieces and of the end, at most `context`. A text that ends with a typed end gets no other."""
        pieces: list[tuple[str, int]] = []
        for number, part in enumerate(self._split(SPACE + text.replace(SPACE, " "))):
            if number % 2:
                pieces.append((part, self._special[part]))
            elif part:
                pieces += self._pieces(part)
        if len(pieces) > 1 and pieces[0][0] == SPACE and pieces[1][0] in self._special:
            del pieces[0]
        ids = [number for _, number in pieces]
        ids = ids if context is None else ids[: context - 1]
        end = self._special[self.end]
        return ids if ids and ids[-1] == end else [*ids, end]

    @cached_property
    def _special(self) -> dict[str, int]:
        return {token.content: number for number, token in self.backend.get_added_tokens_decoder().items()}

    def _split(self, text: str) -> list[str]:
        """Text, special token, text, ... Spaces around a special token belong to it."""
        parts = re.split("(" + "|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) + ")", text)
        for at in range(0, len(parts), 2):
            parts[at] = parts[at].lstrip() if at else parts[at]
            parts[at] = parts[at].rstrip() if at < len(parts) - 1 else parts[at]
        return parts

    def _pieces(self, text: str) -> list[tuple[str, int]]:
        """Cut behind the unknown token's name, which is then dropped: SiglipTokenizer keeps a first space that way."""
        text = re.sub(PUNCTUATION, "", text.lower() if self.lower else text)
        text = re.sub(r"\s+", " ", text).strip()
        return self._cut(self.unknown + text)[self._unknown_length :]

    @cached_property
    def _unknown_length(self) -> int:
        return len(self._cut(self.unknown))

    def _cut(self, text: str) -> list[tuple[str, int]]:
        """sentencepiece's own steps: characters, spaces, pieces. An unknown piece may be a known one by its name."""
        text = self.characters(text) if self.characters is not None else text
        text = re.sub(" +", " ", text).lstrip(" ") if self.one_space else text
        text = SPACE * self.space_first + text.replace(" ", SPACE)
        text = text.rstrip(SPACE) if self.one_space else text
        data, pieces = text.encode(), list[tuple[str, int]]()
        for token in self.cutter.tokenize(text):
            piece, number = token.value, token.id
            if number == self._special[self.unknown]:
                piece = data[slice(*token.offsets)].decode()
                by_name = self.backend.token_to_id(piece)
                number = number if by_name is None else by_name
            pieces.append((piece, number))
        return pieces


def _without_reserved(model: dict[str, Any]) -> Unigram:
    """The same pieces without those that a text never has, such as </s>: their score is 0, all others' is lower."""
    names = [NEVER + name if score == 0 and not BYTE.fullmatch(name) else name for name, score in model["vocab"]]
    vocab = [(name, score) for name, (_, score) in zip(names, model["vocab"], strict=True)]
    return Unigram(vocab, unk_id=model["unk_id"], byte_fallback=model["byte_fallback"])


def one_space() -> list[Any]:
    """Several spaces become one, and none stays at the end."""
    return [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip(left=False, right=True)]


def _rows(parts: list[Any]) -> list[dict[str, Any]]:
    return [_state(part) for part in parts]


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer, as its file has it."""
    return json.loads(part.__getstate__())
