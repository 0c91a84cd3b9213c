"""A CLIP as a classifier of sentences, so that every method that explains a class explains a sentence.

    model = ask(clip, ["a dog", "a cat"])
    relevance(model, "photo.jpg", target="a dog")          # (B, grid_h, grid_w): which patches speak for the sentence
    model.cosines(images)                                  # (B, sentences)

The logit of a sentence is the model's own: the scale times the cosine of image and sentence (SigLIP: plus its bias).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName, as_network
from vitlab.errors import UsageError
from vitlab.layers.edit import Edit
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import Trace
from vitlab.models.base import Capability, Network, evaluation_mode
from vitlab.models.two_towers import TwoTowers


class PromptClassifier(Network):
    """The image tower with a sentence for each class. Other attributes are those of the tower."""

    def __init__(self, clip: TwoTowers, sentences: Sequence[str]):
        super().__init__()
        self.clip = clip
        self.family = clip.image.family
        self.labels = labels = list(dict.fromkeys(sentences))
        self.config = replace(clip.config.image, classes=len(labels))
        self.preprocess, self.card = clip.preprocess, clip.card
        ids = clip.require_tokenizer()(labels).to(clip.text.embed.weight.device)
        with torch.no_grad(), evaluation_mode(clip):
            self.register_buffer("sentences", clip.encode_text(ids), persistent=False)  # (T, E)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            clip: Any = super().__getattr__("clip")
            return getattr(clip.image, name)

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self.clip.image.capabilities | {Capability.CLASSIFY}

    @property
    def traceable(self) -> tuple[str, ...]:
        return self.clip.image.traceable

    @property
    def feature_width(self) -> int:
        return self.clip.image.feature_width

    def grid_of(self, size: tuple[int, int]) -> tuple[int, int]:
        return self.clip.image.grid_of(size)

    def features(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        return self.clip.image.features(images, trace=trace, reducer=reducer, edit=edit)

    def forward_features(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        return self.clip.image.forward_features(images, trace=trace, reducer=reducer, edit=edit)

    def forward(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        """(B, C, H, W) -> (B, sentences)."""
        features = self.clip.encode_image(images, trace=trace, reducer=reducer, edit=edit)  # (B, E)
        return self.clip.logits(features, self.sentences)

    def forward_head(self, tokens: Tensor, *, pre_logits: bool = False, trace: Trace | None = None) -> Tensor:
        """Tokens of the image tower (B, N, D) -> (B, sentences), or features (B, D)."""
        pooled = self.clip.image.forward_head(tokens, pre_logits=True, trace=trace)  # (B, D)
        return pooled if pre_logits else self.clip.logits(self.clip.project_image(pooled), self.sentences)

    @torch.no_grad()
    def cosines(self, images: Tensor, *, batch_size: int = 8) -> Tensor:
        """(B, sentences): cosine of the embeddings of image and sentence."""
        with evaluation_mode(self):
            return torch.cat([self.clip.encode_image(part) @ self.sentences.mT for part in images.split(batch_size)])


def ask(model: ModelOrName, sentences: str | Sequence[str]) -> PromptClassifier:
    """A CLIP with sentences as classes, for relevance, grad_cam, curves and others that explain a class."""
    model = as_network(model)
    if not isinstance(model, TwoTowers):
        raise UsageError(f"only a CLIP or SigLIP reads sentences, and this is a {model.family}.")
    sentences = [sentences] if isinstance(sentences, str) else list(sentences)
    if not sentences or not all(isinstance(text, str) and text.strip() for text in sentences):
        raise UsageError(f"expected sentences, each with a word in it, found {sentences!r}: ask(model, ['a dog']).")
    return PromptClassifier(model, sentences)
