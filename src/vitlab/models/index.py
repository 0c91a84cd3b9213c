"""The index of families: its record in models/, and the one in checkpoints/ for the files of other libraries.

They are asked from the last row to the first whether weights are theirs: transformers' Swin and MAE look like a ViT.
"""

from vitlab.models import (
    aimv2,
    beit,
    clip,
    deit,
    dino,
    dinov2,
    dinov3,
    dpt,
    eomt,
    eva02,
    hybrid,
    linear_head,
    mae,
    naflex,
    pe,
    pvt,
    relpos,
    resnet,
    segformer,
    siglip,
    swin,
    swinv2,
    tips,
    twins,
    vit,
    yolos,
)

INDEX = (
    (vit.PAPER, "vit.FAMILY"),
    (hybrid.PAPER, "hybrid.FAMILY"),  # its blocks are a ViT's
    (deit.PAPER, None),  # its files are a ViT's
    (dinov2.PAPER, None),
    (dino.PAPER, None),  # no other library has the two networks of a pre-training
    (mae.PAPER, "mae.FAMILY"),
    (clip.PAPER, "clip.FAMILY"),
    (clip.VISION_PAPER, "clip.VISION"),  # the image tower alone, with its projection
    (siglip.PAPER, "siglip.FAMILY"),
    (naflex.PAPER, "naflex.FAMILY"),  # after siglip: its names are the same, and only shapes differ
    (naflex.TOWER_PAPER, "naflex.TOWER"),
    (tips.PAPER, "tips.FAMILY"),
    (resnet.PAPER, "resnet.FAMILY"),
    (swin.PAPER, "swin.FAMILY"),
    (swinv2.PAPER, "swinv2.FAMILY"),  # after swin: transformers names them nearly alike
    (pvt.PAPER, "pvt.PVT"),
    (pvt.PAPER_V2, "pvt.PVT_V2"),
    (twins.PAPER, "twins.FAMILY"),
    (beit.PAPER, "beit.FAMILY"),
    (relpos.PAPER, "relpos.FAMILY"),
    (aimv2.PAPER, "aimv2.FAMILY"),
    (aimv2.LIT_PAPER, "aimv2.LIT"),  # after clip: transformers names them nearly alike
    (dinov3.PAPER, "dinov3.FAMILY"),
    (eva02.PAPER, "eva02.FAMILY"),  # after beit: its Ti and S look like one with absolute positions
    (eva02.CLIP_PAPER, "eva02.CLIP"),
    (pe.PAPER, "pe.FAMILY"),
    (pe.CLIP_PAPER, "pe.CLIP"),
    (linear_head.PAPER, None),
    (eomt.PAPER, "eomt.FAMILY"),
    (yolos.PAPER, "yolos.FAMILY"),
    (dpt.PAPER, "dpt.FAMILY"),
    (segformer.PAPER, "segformer.FAMILY"),
)
PAPERS = tuple(paper for paper, _ in INDEX)
