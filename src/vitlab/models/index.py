"""The index of families: its record in models/, and the one in checkpoints/ for the files of other libraries.

They are asked from the last row to the first whether weights are theirs: transformers' Swin and MAE look like a ViT.
"""

from vitlab.models import clip, deit, dino, dinov2, mae, pvt, resnet, siglip, swin, twins, vit

INDEX = (
    (vit.PAPER, "vit.FAMILY"),
    (deit.PAPER, None),  # its files are a ViT's
    (dinov2.PAPER, None),
    (dino.PAPER, None),  # no other library has the two networks of a pre-training
    (mae.PAPER, "mae.FAMILY"),
    (clip.PAPER, "clip.FAMILY"),
    (siglip.PAPER, "siglip.FAMILY"),
    (resnet.PAPER, "resnet.FAMILY"),
    (swin.PAPER, "swin.FAMILY"),
    (pvt.PAPER, "pvt.PVT"),
    (pvt.PAPER_V2, "pvt.PVT_V2"),
    (twins.PAPER, "twins.FAMILY"),
)
PAPERS = tuple(paper for paper, _ in INDEX)
