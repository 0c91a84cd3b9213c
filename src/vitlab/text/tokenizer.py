"""Tokenizers of CLIP, MetaCLIP 2, SigLIP and TIPSv2 on the `tokenizers` library: texts -> (B, context) numbers.

    tokenizer = Tokenizer.train(captions, vocab=1024, context=32)     # your own words
    tokenizer = Tokenizer.read("clip-vit-base-patch32")               # tokenizer.json, or vocab.json + merges.txt
    tokenizer = Tokenizer.read("siglip-base-patch16-224")             # spiece.model; tokenizer.json (SigLIP 2)
    ids = tokenizer(["a dog", "一只狗"])                                # (2, 32), start ... end, then padding

CLIP has byte pairs (arXiv:2103.00020, section 2.4) between a start and an end. SigLIP's texts are lower-cased and have
an end and no start: pieces of a sentencepiece model without punctuation, or in SigLIP 2 Gemma's byte pairs. MetaCLIP 2
has XLM-V's pieces (arXiv:2301.10472) between <s> and </s>, TIPSv2 lower-cased pieces and neither start nor end.

In byte pairs every byte has a number, so there is no unknown word. How long a text may be, what is done with a longer
one and which number fills a shorter one are part of the tokenizer and of its file: OpenAI pads with 0, transformers
with end-of-text.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and the forks of data workers do not go together

from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from vitlab.advice import to_type
from vitlab.errors import TokenizerError
from vitlab.parsing import parse_json
from vitlab.special_files import special_kind
from vitlab.text.bpe import learn_merges
from vitlab.text.sentencepiece import read_sentencepiece
from vitlab.text.siglip import PieceEncoder

START, END, WORD_END = "<|startoftext|>", "<|endoftext|>", "</w>"
PIECES_START, PIECES_END = "<s>", "</s>"  # of a sentencepiece model
GEMMA_START, GEMMA_END = "<bos>", "<eos>"
PADDING = "<pad>"  # Gemma's and XLM-V's
CONTEXT, SIGLIP_CONTEXT = 77, 64  # in a file that does not say another
FILE = "tokenizer.json"
LEAST = 2 * 256 + 2  # every byte, inside and at the end of a word; start and end
PIECES = ("spiece.model", "tokenizer.model")
Options = dict[str, Any]  # context, pad_id, padding_side, truncate
Side = Literal["right", "left"]
WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class Tokenizer:
    """`truncate`: a text that is too long is cut and keeps its end-of-text; False: it is an error that names it."""

    def __init__(
        self,
        backend: Backend,
        *,
        context: int | None = None,
        pad_id: int | None = None,
        padding_side: Side = "right",
        truncate: bool = True,
    ) -> None:
        backend.no_padding()
        ends = (PADDING,) if _has_no_end(backend) else (END, GEMMA_END, PIECES_END)
        end = next((token for token in ends if backend.token_to_id(token) is not None), None)
        end_id, start = None if end is None else backend.token_to_id(end), backend.token_to_id(START)
        if end_id is None or (end == END and start is None):
            raise TokenizerError(
                f"the vocabulary has no {START if end == END else END}: it is none of CLIP's kind, nor, by "
                f"{PIECES_END} or {GEMMA_END}, of SigLIP's."
            )
        if end == PIECES_END and _begins_with(backend, PIECES_START):
            start = backend.token_to_id(PIECES_START)
        usual = SIGLIP_CONTEXT if start is None else CONTEXT
        self.backend, self.context, self.truncate = backend, usual if context is None else context, truncate
        self.start_id: int | None = start  # None: a text begins with its first word
        self.end_id: int = end_id  # where nothing ends a text but padding, its number
        self.padding_side: Side = padding_side
        self.pieces = PieceEncoder.of(backend, PIECES_END) if end == PIECES_END else None
        has_padding = end == GEMMA_END or (end == PIECES_END and start is not None)
        padding = backend.token_to_id(PADDING) if has_padding else None
        self.pad_id: int = pad_id if pad_id is not None else self.end_id if padding is None else padding
        context = self.context
        if context < 3:
            raise TokenizerError(f"context={context} has no room for a word between start and end: use 3 or more.")
        if (padding := backend.id_to_token(self.pad_id)) is None:
            raise TokenizerError(f"pad_id={self.pad_id} is not in the vocabulary of {self.vocab} tokens.")
        backend.enable_padding(direction=padding_side, length=context, pad_id=self.pad_id, pad_token=padding)
        if truncate:
            backend.enable_truncation(max_length=context)
        else:
            backend.no_truncation()

    @property
    def vocab(self) -> int:
        """How many tokens there are."""
        return self.backend.get_vocab_size()

    @property
    def options(self) -> dict[str, int]:
        """What a model for this tokenizer is made with: vitlab.create("clip_nano", **tokenizer.options)."""
        return {"vocab": self.vocab, "context": self.context, "end_id": self.end_id, "pad_id": self.pad_id}

    def __call__(self, texts: str | Sequence[str]) -> Tensor:
        """(B, context); one text is a batch of one."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        for text in texts:
            if not isinstance(text, str):
                raise TokenizerError(f"expected texts, found {text!r:.60}, a {type(text).__name__}.")
            if not text.isascii() and re.search("[\ud800-\udfff]", text):  # of bytes that are not UTF-8
                raise TokenizerError(f"{text!r:.60} is not valid Unicode: write it as UTF-8.")
        rows = self._encode(texts)
        for text, row in zip(texts, rows, strict=True):
            if len(row) > self.context:  # where truncate is not set
                raise TokenizerError(
                    f"{text!r:.60} is {len(row)} tokens long, start and end included, and at most {self.context} "
                    f"fit: {to_type('shorten it, or use truncate=True', 'shorten it')}."
                )
        return torch.tensor(rows, dtype=torch.long).reshape(len(texts), self.context)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Truncated where it is to be, and padded."""
        if self.pieces is None:
            return [encoding.ids for encoding in self.backend.encode_batch(texts)]
        rows = [self.pieces.encode(text, self.context if self.truncate else None) for text in texts]
        padding = [[self.pad_id] * (self.context - len(row)) for row in rows]
        right = self.padding_side == "right"
        return [row + more if right else more + row for row, more in zip(rows, padding, strict=True)]

    def decode(self, ids: Tensor | Sequence[int]) -> str | list[str]:
        """The text between start and the first end-of-text; of a batch (B, N), a list."""
        rows: Any = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        if rows and isinstance(rows[0], list):
            return [self._decode(row) for row in rows]
        return self._decode(rows)

    def _decode(self, row: list[int]) -> str:
        row = row[: row.index(self.end_id)] if self.end_id in row else row
        unread = {self.start_id, self.pad_id}
        text = self.backend.decode([number for number in row if number not in unread], skip_special_tokens=False)
        return text.replace(WORD_END, " ").strip()

    # ---- files

    def to_json(self) -> str:
        """tokenizer.json, as the `tokenizers` library and transformers read it; its padding and truncation are ours."""
        return self.backend.to_str(pretty=True)

    @classmethod
    def from_json(cls, text: str, defaults: Options | None = None, **options: Any) -> Tokenizer:
        """Read what `to_json` wrote, or any tokenizer.json of CLIP's or SigLIP's kind. `options` change context,
        pad_id, padding_side, truncate; `defaults` are for those that the file does not state.
        """
        try:
            backend = Backend.from_str(text)
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(f"is no {FILE} that can be read ({error}). Fetch or write it again.") from None
        if is_gemma(backend):
            _lower_case(backend)
        padding, truncation = backend.padding or {}, backend.truncation or {}
        stored = {
            "context": padding.get("length") or truncation.get("max_length"),
            "pad_id": padding.get("pad_id"),
            "padding_side": padding.get("direction"),
            "truncate": False if padding and not truncation else None,
        }
        return cls(backend, **{**(defaults or {}), **_given(stored), **options})

    def save(self, folder: str | Path) -> Path:
        """Write tokenizer.json into a folder."""
        folder = Path(folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(self.to_json(), encoding="utf-8")
        return folder / FILE

    @classmethod
    def read(
        cls,
        path: str | Path,
        *,
        context: int | None = None,
        pad_id: int | None = None,
        truncate: bool | None = None,
    ) -> Tokenizer:
        """From tokenizer.json, vocab.json with merges.txt beside it, spiece.model, a folder of these, or OpenAI's
        bpe_simple_vocab_16e6.txt.gz. What is not given is as the files say, or as CLIP has it: 77 and end-of-text;
        SigLIP: 64.
        """
        path = Path(path).expanduser()
        options = _given(dict(context=context, pad_id=pad_id, truncate=truncate))
        try:
            if path.is_dir():
                return cls._read_folder(path, options)
            if kind := special_kind(path):
                raise TokenizerError(f"is {kind}, and no file that can be read. Name a {FILE}, or its folder.")
            if not path.is_file():
                raise TokenizerError("there is no such file or folder.")
            if path.name.endswith((".txt", ".gz")) and path.name != "merges.txt":
                return cls(_openai(path), **options)
            if path.suffix == ".model":
                return cls._read_pieces(path, options)
            if path.name in ("vocab.json", "merges.txt"):
                return cls(_two_files(path.parent), **{**_config_options(path.parent), **options})
            return cls.from_json(path.read_text(encoding="utf-8"), **options)
        except (TokenizerError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path}: {error}") from None

    @classmethod
    def _read_folder(cls, folder: Path, options: Options) -> Tokenizer:
        config = _read_config(folder)
        defaults = _config_options(folder)
        pieces = next((folder / name for name in PIECES if (folder / name).is_file()), None)
        if pieces is not None and (config.get("tokenizer_class") == "SiglipTokenizer" or not (folder / FILE).is_file()):
            return cls._read_pieces(pieces, options)
        if (folder / FILE).is_file():
            if str(config.get("tokenizer_class")).startswith(("Gemma", "Siglip2")):  # as these classes are without more
                defaults["padding_side"] = "left"
            stated = _given({"padding_side": config.get("padding_side")})
            tokenizer = cls.from_json((folder / FILE).read_text(encoding="utf-8"), defaults, **{**stated, **options})
            if is_gemma(tokenizer.backend):
                _set_ends(tokenizer.backend, config)
            return tokenizer
        if (folder / "vocab.json").is_file() or (folder / "merges.txt").is_file():
            return cls(_two_files(folder), **{**defaults, **options})
        raise TokenizerError(f"expected {FILE}, {PIECES[0]}, or vocab.json and merges.txt, and found neither.")

    @classmethod
    def _read_pieces(cls, path: Path, options: Options) -> Tokenizer:
        """A sentencepiece model, as transformers' SiglipTokenizer reads it."""
        config = _read_config(path.parent)
        end, unknown, padding = (
            _token(config, f"{name}_token", usual)
            for name, usual in (("eos", PIECES_END), ("unk", "<unk>"), ("pad", PIECES_END))
        )
        if end != PIECES_END:
            raise TokenizerError(f"ends a text by {end!r}; expected {PIECES_END!r}.")
        lower = config.get("do_lower_case", True) is not False
        backend = read_sentencepiece(path, lower=lower, unknown=unknown, padding=padding)
        pad_id = backend.token_to_id(padding)
        stated = _given({"pad_id": pad_id, "padding_side": config.get("padding_side")})
        return cls(backend, **{**_config_options(path.parent), **stated, **options})

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder holds the files of a tokenizer."""
        return any((folder / name).is_file() for name in (FILE, "vocab.json", "merges.txt", *PIECES))

    def to_two_files(self) -> dict[str, str]:
        """vocab.json and merges.txt, for programs that do not read tokenizer.json."""
        model = json.loads(self.backend.to_str())["model"]
        vocab = {**model["vocab"], START: self.start_id, END: self.end_id}
        pairs = [" ".join(pair) for pair in model["merges"]]
        in_order = dict(sorted(vocab.items(), key=lambda item: item[1]))
        text = json.dumps(in_order, ensure_ascii=False)
        return {"vocab.json": text, "merges.txt": "\n".join(["#version: 0.2", *pairs, ""])}

    # ---- a vocabulary of your own

    @classmethod
    def train(
        cls,
        captions: Iterable[str],
        *,
        vocab: int = 1024,
        context: int = CONTEXT,
        pad_id: int | None = None,
        truncate: bool = True,
    ) -> Tokenizer:
        """Byte pairs of these captions, most frequent first; fewer than `vocab` tokens where the words are few.

        The same captions, in any order, give the same tokenizer in every process.
        Tokens are numbered as in CLIP: bytes, bytes that end a word, pairs as they were merged, start, end.
        """
        if vocab < LEAST:
            raise TokenizerError(f"vocab={vocab} is too small: {LEAST} tokens are the bytes, start and end.")
        backend, counts = _backend(BPE(end_of_word_suffix=WORD_END)), Counter[str]()
        for caption, count in Counter(captions).items():
            for word in _split_words(backend, caption):
                counts[word] += count
        pairs = learn_merges(counts, WORD_END)
        return cls(_assemble(pairs, vocab), context=context, pad_id=pad_id, truncate=truncate)


def _letters() -> list[str]:
    """The 256 bytes as printable characters, in the order in which CLIP numbers them: readable ones first."""
    readable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return [chr(byte) for byte in readable] + [chr(256 + n) for n in range(256 - len(readable))]


def _split_words(backend: Backend, text: str) -> list[str]:
    """The words of a text after normalisation, their bytes as printable characters."""
    assert backend.normalizer is not None and backend.pre_tokenizer is not None
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))]


def _assemble(pairs: Iterable[tuple[str, str]], vocab: int) -> Backend:
    """A tokenizer of `vocab` tokens at most: bytes, bytes at a word's end, what the pairs make, start, end."""
    letters = _letters()
    tokens = dict.fromkeys([*letters, *(letter + WORD_END for letter in letters)])
    kept = []
    for pair in pairs:
        if "".join(pair) not in tokens and len(tokens) + 2 == vocab:
            break
        tokens["".join(pair)] = None
        kept.append(pair)
    numbers = {token: number for number, token in enumerate([*tokens, START, END])}
    return _backend(BPE(vocab=numbers, merges=kept, end_of_word_suffix=WORD_END, unk_token=END))


def _backend(model: BPE) -> Backend:
    """What CLIP does to a text before the pairs: one kind of space, lower case, words and single digits."""
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    start, end = backend.token_to_id(START), backend.token_to_id(END)
    if start is not None and end is not None:
        backend.add_special_tokens([START, END])
        backend.post_processor = processors.RobertaProcessing(  # type: ignore[assignment]
            (END, end), (START, start), trim_offsets=False, add_prefix_space=False
        )
    return backend


def _two_files(folder: Path) -> Backend:
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not merges.is_file():
        raise TokenizerError("merges.txt is missing: vocab.json and merges.txt belong together.")
    if not vocab.is_file():  # CLIP numbers its tokens by the order of the pairs
        lines = merges.read_text(encoding="utf-8").split("\n")[1:]
        pairs = _pairs(lines, "merges.txt")
        return _assemble(pairs, LEAST + len(pairs))
    try:
        return _backend(BPE.from_file(str(vocab), str(merges), end_of_word_suffix=WORD_END, unk_token=END))
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(f"vocab.json and merges.txt do not fit ({error}). Fetch both again.") from None


def _openai(path: Path) -> Backend:
    """OpenAI's list of pairs: a heading, then more lines than its vocabulary of 49,408 uses."""
    try:
        packed = path.suffix == ".gz"
        text = gzip.decompress(path.read_bytes()).decode() if packed else path.read_text(encoding="utf-8")
    except (OSError, EOFError) as error:
        raise TokenizerError(f"cannot be read ({error}). Fetch it again.") from None
    return _assemble(_pairs(text.split("\n")[1:], "bpe_simple_vocab_16e6.txt.gz"), 49408)


def _pairs(lines: list[str], like: str) -> list[tuple[str, str]]:
    """One pair in each line."""
    pairs = [line.split() for line in lines if line]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise TokenizerError(f"expected two parts of a word in each line, as in {like}.")
    return [(a, b) for a, b in pairs]


def _given(options: Options) -> Options:
    return {name: value for name, value in options.items() if value is not None}


def is_gemma(backend: Backend) -> bool:
    return isinstance(backend.model, BPE) and None not in (
        backend.token_to_id(GEMMA_START),
        backend.token_to_id(GEMMA_END),
    )


def _has_no_end(backend: Backend) -> bool:
    """TIPSv2: nothing is added to the pieces of a text."""
    metaspace = "Metaspace" in repr(backend.pre_tokenizer)
    return metaspace and backend.token_to_id(PADDING) is not None and not backend.encode("").ids


def _begins_with(backend: Backend, token: str) -> bool:
    number = backend.token_to_id(token)
    return number is not None and backend.encode("").ids[:1] == [number]


def _lowers(backend: Backend) -> bool:
    return "Lowercase" in repr(backend.normalizer)


def _lower_case(backend: Backend) -> None:
    """SigLIP 2 learned from lower case alone; its files hold Gemma's tokenizer, which leaves a text as it is."""
    if _lowers(backend):
        return
    others = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])  # type: ignore[assignment]


def _set_ends(backend: Backend, config: Options) -> None:
    """Which tokens begin and end a text, where tokenizer_config.json says it."""
    ends = {
        "add_bos_token": _token(config, "bos_token", GEMMA_START),
        "add_eos_token": _token(config, "eos_token", GEMMA_END),
    }
    if not ends.keys() & config.keys():
        return
    first, last = (token if config.get(name) else "" for name, token in ends.items())
    special = [(token, backend.token_to_id(token)) for token in (first, last) if token]
    backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{first} $A {last}".strip(), special_tokens=special
    )


def _token(config: Options, name: str, usual: str) -> str:
    """A special token in tokenizer_config.json: its text, or an object that holds it."""
    value = config.get(name)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else usual


def _read_config(folder: Path) -> Options:
    """transformers' tokenizer_config.json; nothing where there is none."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path.name} is not valid JSON ({error}). Fetch it again, or remove it.") from None
    if not isinstance(config, dict):
        raise TokenizerError(f"{path.name} holds a {type(config).__name__}, expected a JSON object.")
    return config


def _config_options(folder: Path) -> Options:
    """The context length in transformers' tokenizer_config.json."""
    length = _read_config(folder).get("model_max_length")
    return {"context": length} if isinstance(length, int) and 3 <= length < 10**6 else {}
