"""Do learned positions know the grid?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scipy.stats import rankdata

from vitlab.explain.distance import patch_distances
from vitlab.explain.weights import position_similarity
from vitlab.models.plain import PlainTransformer
from vitlab.study.reproduce.bench import Workbench
from vitlab.study.reproduce.bundled import bundled_encoder, model_by_model
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.verdict import difference, value
from vitlab.training.loop import Show

MODELS = ("digits", "cifar10", "dino", "clip")  # with learned positions


def correlation(model: PlainTransformer) -> float:
    """Spearman's correlation of similarity with distance, over all pairs of different patches."""
    similarity = position_similarity(model)  # (h, w, h, w)
    h, w = similarity.shape[:2]
    pairs = torch.triu_indices(h * w, h * w, offset=1)
    distance = patch_distances((h, w), 1)[pairs[0], pairs[1]]
    cosines = similarity.reshape(h * w, h * w)[pairs[0], pairs[1]]
    return float(np.corrcoef(rankdata(cosines.numpy()), rankdata(distance.numpy()))[0, 1])


def measure(name: str, folder: Path, show: Show) -> dict[str, float]:
    model = bundled_encoder(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(MODELS.index(name))  # two have the same config
        untrained = type(model)(model.config)
    return {"trained": correlation(model), "untrained": correlation(untrained)}


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    return model_by_model(MODELS, measure)


CLAIM = Claim(
    name="position-similarity",
    title=Text("Learned positions of near patches are similar", "相邻图块学到的位置向量相似"),
    paper=Citation("ViT", "2010.11929", "Section 4.5, Figure 7 centre"),
    says=Text(
        "Closer patches tend to have more similar position embeddings, and rows and columns can be seen.",
        "越近的图块，位置嵌入往往越相似，还能看出行与列。",
    ),
    here=Text(
        "Spearman's correlation of the cosine of two position vectors with the distance of their patches, in the "
        "bundled models with learned positions, and in the same networks before training.",
        "两个位置向量的余弦与图块距离的 Spearman 相关系数，取自带可学习位置的内置模型，并与训练前的同样网络比较。",
    ),
    arms=(Arm("trained"), Arm("untrained")),
    rule=(value("trained", high=0.0), difference("trained", "untrained", high=0.0)),
    steps=steps,
    scale="number",
    measured="correlation of similarity with distance",
    seeded=False,
    minutes=0.1,
)
