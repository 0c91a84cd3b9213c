"""The index of papers: one line for each."""

from vitlab.models import clip, deit, dino, dinov2, mae, pvt, resnet, swin, twins, vit

PAPERS = (
    vit.PAPER,
    deit.PAPER,
    dinov2.PAPER,
    dino.PAPER,
    mae.PAPER,
    clip.PAPER,
    resnet.PAPER,
    swin.PAPER,
    pvt.PAPER,
    pvt.PAPER_V2,
    twins.PAPER,
)
