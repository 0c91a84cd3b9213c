"""Post-norm needs warm-up, pre-norm does not."""

from __future__ import annotations

from vitlab.study.reproduce.bench import ADAMW, Workbench
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.grid import grid
from vitlab.study.reproduce.verdict import difference

EPOCHS, DEPTH, WARMUP = 12, 8, 3.0
OPTIM = {**ADAMW, "clip": 0.0}
ARMS = {
    f"{kind}-norm, {name}": {"model.norm": kind, "model.depth": DEPTH, "optim.warmup_epochs": epochs}
    for kind in ("pre", "post")
    for name, epochs in {"warm-up": WARMUP, "no warm-up": 0.0}.items()
}
MARGIN = 0.05


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    return grid(ARMS, lambda varied, seed: bench.network("vit", EPOCHS, seed, varied, optim=OPTIM), seeds)


CLAIM = Claim(
    name="post-norm",
    title=Text("Post-norm needs warm-up, pre-norm does not", "Post-norm 需要预热，pre-norm 不需要"),
    paper=Citation("Xiong et al.", "2002.04745", "Section 3.2, Figure 2; Section 4"),
    says=Text(
        "Translation IWSLT14 De-En, post-norm with Adam: 8.45 BLEU without warm-up and about 34 with it; pre-norm "
        "trains as well without.",
        "IWSLT14 德英翻译，post-norm 加 Adam：不预热 8.45 BLEU，预热约 34；pre-norm 不预热也能训练得同样好。",
    ),
    here=Text(
        f"A ViT with {DEPTH} layers, {EPOCHS} epochs of AdamW with lr 0.002, with and without {WARMUP:.0f} epochs "
        "of warm-up.",
        f"{DEPTH} 层 ViT，AdamW，lr 0.002，{EPOCHS} 个 epoch，有或没有 {WARMUP:.0f} 个 epoch 的预热。",
    ),
    arms=tuple(map(Arm, ARMS)),
    rule=(
        difference("post-norm, warm-up", "post-norm, no warm-up", low=MARGIN),
        difference("pre-norm, warm-up", "pre-norm, no warm-up", high=MARGIN),
    ),
    steps=steps,
    minutes=4,
)
