"""The eight exercises in order, each with the sizes it is tested on.

All sizes of a case differ, so that the length of an axis identifies it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.attention import Attention
from vitlab.layers.block import MLP, Block
from vitlab.layers.patches import PatchEmbed
from vitlab.learn.child import joined_gradients
from vitlab.learn.references import CLIPLossReference, MaskingReference, PositionsReference
from vitlab.learn.variants import clip, mae, positions, vit
from vitlab.learn.variants.base import Note, Sizes, Weights, no_record
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import ViTConfig

HERE = Path(__file__).parent
LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Exercise:
    name: str
    class_name: str
    signature: str  # of the learner's class
    titles: dict[str, str]
    cases: tuple[Sizes, ...]
    make: Callable[[Sizes], nn.Module]  # ours
    arguments: Callable[[Sizes], tuple[Any, ...]]  # of the learner's class
    shapes: Callable[[Sizes], tuple[tuple[int, ...], ...]]  # of the inputs of forward
    function: Callable[..., Tensor]  # of variants/
    variant: type  # its options
    scale: Callable[[int], float] = lambda number: 1.0  # of the inputs of each case
    renamed: dict[str, str] = field(default_factory=dict)  # our name of a weight -> the learner's
    steps: tuple[str, ...] = ()  # of the page (serve/page/steps.js) that it is about; the first shows it best
    panel: str | None = None  # of the page (serve/page/panels.js), for what is no step of a forward pass

    @property
    def file(self) -> str:
        return f"{self.name.replace('-', '_')}.py"

    @property
    def command(self) -> str:
        """Writes the starter file."""
        return f"vitlab learn {self.name}"

    @property
    def fragment(self) -> str:
        """The end of the page's URL that opens it where this exercise is shown."""
        return f"#step={self.steps[0]}" if self.steps else f"#panel={self.panel}"

    def starter(self, language: str) -> str:
        return (HERE / "starters" / language / self.file).read_text(encoding="utf-8")

    def write_starter(self, language: str) -> bool:
        """Write the starter file into the current folder; False if there is a file of this name already."""
        if Path(self.file).exists():
            return False
        Path(self.file).write_text(self.starter(language), encoding="utf-8")
        return True

    def solution(self) -> str:
        return (HERE / "solutions" / self.file).read_text(encoding="utf-8")

    def case(self, number: int) -> ExerciseCase:
        """Our layer with random weights (no zeros, no ones), and inputs."""
        sizes = self.cases[number]
        random = torch.Generator().manual_seed(1000 + number)
        module = self.make(sizes).eval()
        with torch.no_grad():
            for key, weight in module.named_parameters():
                weight.copy_(_random_weight(key, weight, random))
        inputs = tuple(torch.randn(s, generator=random) * self.scale(number) for s in self.shapes(sizes))
        return ExerciseCase(self, sizes, module, {k: v.detach() for k, v in module.state_dict().items()}, inputs)

    def all_cases(self) -> list[ExerciseCase]:
        return [self.case(number) for number in range(len(self.cases))]


@dataclass(frozen=True)
class ExerciseCase:
    exercise: Exercise
    sizes: Sizes
    module: nn.Module
    weights: Weights
    inputs: tuple[Tensor, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.exercise.arguments(self.sizes)

    @property
    def learner_weights(self) -> Weights:
        return {self.exercise.renamed.get(key, key): value for key, value in self.weights.items()}

    def ours(self) -> tuple[Tensor, Tensor]:
        """Output of our layer, and the gradients of its weighted sum with respect to the inputs, as one row."""
        inputs = [x.clone().requires_grad_() for x in self.inputs]
        y = self.module(*inputs)
        (y * probe(y)).sum().backward()
        return y.detach(), joined_gradients(inputs)

    @torch.no_grad()
    def variant(self, **options: Any) -> Tensor:
        return self._run(no_record, options)

    @torch.no_grad()
    def steps(self) -> dict[str, Tensor]:
        steps: dict[str, Tensor] = {}

        def note(name: str, value: Tensor) -> Tensor:
            steps[name] = value
            return value

        self._run(note, {})
        return steps

    @torch.no_grad()
    def last_step_before_error(self, **options: Any) -> Tensor | None:
        """Where a mistake makes shapes that do not fit: the last step that could be computed. None: all could be."""
        last: list[Tensor] = []

        def note(name: str, value: Tensor) -> Tensor:
            last[:] = [value]
            return value

        try:
            self._run(note, options)
        except RuntimeError:
            return last[0] if last else None
        return None

    def _run(self, note: Note, options: dict[str, object]) -> Tensor:
        variant = self.exercise.variant(**options)
        return self.exercise.function(self.weights, *self.inputs, self.sizes, variant, note)


def probe(y: Tensor) -> Tensor:
    """Fixed factors, so that every output contributes differently to the gradient."""
    return torch.linspace(-1, 1, y.numel()).reshape(y.shape)


def _random_weight(key: str, weight: Tensor, random: torch.Generator) -> Tensor:
    noise = torch.randn(weight.shape, generator=random)
    if key.endswith("bias"):
        return 0.3 * noise
    if weight.ndim <= 1:  # of a norm, or the logarithm of a scale
        return 1 + 0.5 * noise
    if "token" in key or "positions" in key:
        return noise
    return 1.5 * noise * weight[0].numel() ** -0.5


# ---------------------------------------------------------------- the table


def _vit(s: Sizes) -> VisionTransformer:
    config = ViTConfig((s["H"], s["W"]), s["P"], s["C"], s["classes"], s["D"], s["L"], s["h"])
    return VisionTransformer(config.with_options(mlp_ratio=s["hidden"] / s["D"]))


def _positions(s: Sizes) -> PositionsReference:
    return PositionsReference(*_positions_arguments(s))


def _positions_arguments(s: Sizes) -> tuple[tuple[int, int], int, bool]:
    return (s["old rows"], s["old columns"]), s["D"], bool(s["learned"])


def _masking_arguments(s: Sizes) -> tuple[Any, ...]:
    return *(s[key] for key in ("N", "C*P*P", "D", "h", "hidden")), s["mask percent"] / 100


def _clip_arguments(s: Sizes) -> tuple[int, ...]:
    return s["I"], s["T"], s["E"]


def _images(s: Sizes) -> tuple[tuple[int, ...]]:
    return ((s["B"], s["C"], s["H"], s["W"]),)


def _tokens(s: Sizes) -> tuple[tuple[int, ...]]:
    return ((s["B"], s["N"], s["D"]),)


EXERCISES: dict[str, Exercise] = {
    e.name: e
    for e in (
        Exercise(
            *("patch-embed", "PatchEmbed", "PatchEmbed(patch_size, channels, width)"),
            titles={"en": "images to tokens, eq. 1", "zh": "从图像到 token，式 1"},
            cases=(
                dict(B=2, C=3, H=20, W=28, P=4, N=35, D=11),
                dict(B=1, C=1, H=9, W=15, P=3, N=15, D=7),
            ),
            make=lambda s: PatchEmbed(s["P"], s["C"], s["D"]),
            arguments=lambda s: (s["P"], s["C"], s["D"]),
            shapes=_images,
            function=vit.patch_embed,
            variant=vit.PatchEmbedVariant,
            steps=("embed", "patches"),
        ),
        Exercise(
            *("attention", "Attention", "Attention(width, heads)"),
            titles={"en": "multi-head self-attention, eqs. 5-8", "zh": "多头自注意力，式 5-8"},
            cases=(dict(B=2, N=7, D=15, h=3, d=5), dict(B=1, N=6, D=28, h=4, d=7)),
            make=lambda s: Attention(s["D"], s["h"]),
            arguments=lambda s: (s["D"], s["h"]),
            shapes=_tokens,
            function=vit.attention,
            variant=vit.AttentionVariant,
            steps=("scores", "qkv", "softmax", "mix", "heads", "proj"),
        ),
        Exercise(
            *("mlp", "MLP", "MLP(width, hidden)"),
            titles={"en": "the MLP of a block, eq. 3", "zh": "编码器块中的 MLP，式 3"},
            cases=(dict(B=2, N=7, D=15, hidden=44), dict(B=1, N=5, D=8, hidden=33)),
            make=lambda s: MLP(s["D"], s["hidden"]),
            arguments=lambda s: (s["D"], s["hidden"]),
            shapes=_tokens,
            function=vit.mlp,
            variant=vit.MLPVariant,
            steps=("gelu", "fc1", "fc2"),
        ),
        Exercise(
            *("block", "Block", "Block(width, heads, hidden)"),
            titles={"en": "one encoder block, eqs. 2-3", "zh": "一个编码器块，式 2-3"},
            cases=(dict(B=2, N=7, D=15, h=3, d=5, hidden=44), dict(B=1, N=6, D=28, h=4, d=7, hidden=33)),
            make=lambda s: Block(Attention(s["D"], s["h"]), MLP(s["D"], s["hidden"]), s["D"]),
            arguments=lambda s: (s["D"], s["h"], s["hidden"]),
            shapes=_tokens,
            function=vit.block,
            variant=vit.BlockVariant,
            steps=("block", "norm1", "add1", "norm2", "add2"),
            scale=lambda number: (1.0, 0.02)[number],  # small tokens, so that the eps of LayerNorm matters
        ),
        Exercise(
            *("vit", "ViT", "ViT(image_size, patch_size, channels, classes, width, depth, heads, hidden)"),
            titles={"en": "the whole Vision Transformer, eqs. 1-4", "zh": "完整的 Vision Transformer，式 1-4"},
            cases=(
                dict(B=2, C=3, H=20, W=28, P=4, N=35, D=15, h=5, d=3, L=3, hidden=44, classes=11),
                dict(B=1, C=1, H=9, W=15, P=3, N=15, D=28, h=4, d=7, L=2, hidden=33, classes=5),
            ),
            make=_vit,
            arguments=lambda s: ((s["H"], s["W"]), *(s[k] for k in ("P", "C", "classes", "D", "L", "h", "hidden"))),
            shapes=_images,
            function=vit.vit,
            variant=vit.ViTVariant,
            steps=("image", "prefix", "norm", "pool", "head", "answer"),
            renamed={"positions.table": "positions"},
        ),
        Exercise(
            *("positions", "Positions", "Positions(grid, width, learned)"),
            titles={"en": "positions for any grid, eq. 1", "zh": "适用于任意网格的位置编码，式 1"},
            cases=(  # 4 x 9 = 36 = 6 x 6, so that a grid guessed from the number of positions is a wrong grid
                {"B": 2, "rows": 5, "columns": 7, "N": 35, "D": 12, "learned": 0, "old rows": 4, "old columns": 9},
                {"B": 1, "rows": 6, "columns": 3, "N": 18, "D": 20, "learned": 0, "old rows": 4, "old columns": 9},
                {"B": 2, "rows": 6, "columns": 11, "N": 66, "D": 8, "learned": 1, "old rows": 4, "old columns": 9},
                {"B": 1, "rows": 3, "columns": 5, "N": 15, "D": 8, "learned": 1, "old rows": 4, "old columns": 9},
            ),
            make=_positions,
            arguments=_positions_arguments,
            shapes=lambda s: ((s["B"], s["rows"], s["columns"], s["D"]),),
            function=positions.positions,
            variant=positions.PositionsVariant,
            steps=("positions",),
            renamed={"positions.table": "table"},
        ),
        Exercise(
            *("mae-masking", "MAE", "MAE(patches, values, width, heads, hidden, mask_ratio)"),
            titles={"en": "hide patches, restore their order: MAE", "zh": "遮住图块、恢复顺序：MAE"},
            cases=(
                {"B": 2, "N": 35, "C*P*P": 12, "D": 15, "h": 5, "d": 3, "hidden": 44, "mask percent": 75},
                {"B": 1, "N": 16, "C*P*P": 9, "D": 28, "h": 4, "d": 7, "hidden": 33, "mask percent": 60},
            ),
            make=lambda s: MaskingReference(*_masking_arguments(s)),
            arguments=_masking_arguments,
            shapes=lambda s: ((s["B"], s["N"], s["C*P*P"]), (s["B"], s["N"])),
            function=mae.masking,
            variant=mae.MaskingVariant,
            panel="mae",
        ),
        Exercise(
            *("clip-loss", "CLIPLoss", "CLIPLoss(image_width, text_width, width)"),
            titles={"en": "match images and texts: the loss of CLIP", "zh": "让图像与文本配对：CLIP 的损失"},
            cases=(dict(B=5, I=11, T=13, E=7), dict(B=3, I=8, T=6, E=4)),
            make=lambda s: CLIPLossReference(*_clip_arguments(s)),
            arguments=_clip_arguments,
            shapes=lambda s: ((s["B"], s["I"]), (s["B"], s["T"])),
            function=clip.clip_loss,
            variant=clip.CLIPLossVariant,
            panel="sentences",
        ),
    )
}


def page_links() -> list[dict[str, Any]]:
    """Which steps and panels of the page belong to which exercise, as plain values for JSON."""
    return [
        {
            "exercise": e.name,
            "titles": e.titles,
            "command": e.command,
            "steps": list(e.steps),
            "panel": e.panel,
            "fragment": e.fragment,
        }
        for e in EXERCISES.values()
    ]


def find(name: str) -> Exercise:
    """Exercise by name; _ and - are equal."""
    key = name.lower().replace("_", "-")
    if key not in EXERCISES:
        near = get_close_matches(key, EXERCISES, n=1)
        suggestion = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"there is no exercise {name!r}: they are {', '.join(EXERCISES)}.{suggestion}")
    return EXERCISES[key]
