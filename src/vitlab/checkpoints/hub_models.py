"""Well-known models of the Hugging Face hub, by family: size, licence, whether they are gated and load here.

tests/checkpoints/test_hub_models.py loads each from its real config. Licences are those that the model pages state.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import Any

from vitlab.tables import Table, Tabular, by


@dataclass(frozen=True)
class HubModel:
    name: str  # owner/name
    family: str  # the paper's name
    loads_as: str  # our family; empty: it is not read
    licence: str
    parameters: float | None = None  # in millions, of what is loaded
    image_size: int | tuple[int, int] | None = None  # that its positions were made for; (H, W) where they differ
    gated: bool = False  # the owner must give access first
    note: str = ""  # what is left out, or why it is not read

    @property
    def loads(self) -> bool:
        return bool(self.loads_as)

    def to_dict(self) -> dict[str, Any]:
        parameters = None if self.parameters is None else round(self.parameters * 1e6)
        return {**asdict(self), "parameters": parameters, "loads": self.loads}

    def cells(self) -> list[str]:
        parameters = f"{self.parameters:,.1f}M" if self.parameters else "-"
        gated, loads = ("yes" if answer else "no" for answer in (self.gated, self.loads))
        size = by(self.image_size) if isinstance(self.image_size, tuple) else str(self.image_size or "-")
        return [self.name, self.family, parameters, size, self.licence, gated, loads, self.note]


class HubModels(Tabular, list[HubModel]):
    def table(self) -> Table:
        note = (
            'Load one by vitlab.load("hf-hub:NAME"). Others of these families load too. Gated: accept the licence on '
            "the model's page at huggingface.co first, then `hf auth login`."
        )
        titles = ["name", "family", "parameters", "image", "licence", "gated", "loads", ""]
        return Table(titles, [model.cells() for model in self], right=("parameters", "image"), notes=[note])


def _rows(
    family: str,
    loads_as: str,
    licence: str,
    *rows: tuple[str, float, int | tuple[int, int]],
    gated: bool = False,
    note: str = "",
) -> tuple[HubModel, ...]:
    return tuple(HubModel(name, family, loads_as, licence, n, size, gated, note) for name, n, size in rows)


APACHE, MIT, NC, DINOV3 = "apache-2.0", "mit", "cc-by-nc-4.0", "dinov3-license"

HUB_MODELS: tuple[HubModel, ...] = (
    *_rows(
        "ViT",
        "vit",
        APACHE,
        ("google/vit-base-patch16-224", 86.6, 224),
        ("google/vit-base-patch16-224-in21k", 86.4, 224),
        ("google/vit-base-patch16-384", 86.9, 384),
        ("google/vit-large-patch16-224", 304.3, 224),
        ("google/vit-huge-patch14-224-in21k", 632.4, 224),
        ("WinKawaks/vit-tiny-patch16-224", 5.7, 224),
        ("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", 5.7, 224),
        ("timm/vit_base_patch16_224.augreg2_in21k_ft_in1k", 86.6, 224),
        ("timm/vit_large_patch14_clip_336.openai_ft_in12k_in1k", 304.5, 336),
    ),
    *_rows(
        "DeiT",
        "vit",
        APACHE,
        ("facebook/deit-small-patch16-224", 22.1, 224),
        ("facebook/deit-base-distilled-patch16-224", 87.3, 224),
        ("timm/deit3_base_patch16_224.fb_in22k_ft_in1k", 86.6, 224),
    ),
    *_rows(
        "DINO",
        "vit",
        APACHE,
        ("facebook/dino-vits16", 21.7, 224),
        ("facebook/dino-vitb16", 85.8, 224),
        ("facebook/dino-vitb8", 85.8, 224),
    ),
    *_rows(
        "DINOv2",
        "vit",
        APACHE,
        ("facebook/dinov2-small", 22.1, 518),
        ("facebook/dinov2-base", 86.6, 518),
        ("facebook/dinov2-large", 304.4, 518),
        ("facebook/dinov2-giant", 1136.5, 518),
        ("facebook/dinov2-with-registers-base", 86.6, 518),
        ("facebook/dinov2-base-imagenet1k-1-layer", 88.1, 518),
        ("timm/vit_base_patch14_dinov2.lvd142m", 86.6, 518),
        ("timm/vit_small_patch14_reg4_dinov2.lvd142m", 22.1, 518),
    ),
    *_rows(
        "DINOv3",
        "dinov3",
        DINOV3,
        ("facebook/dinov3-vits16-pretrain-lvd1689m", 21.6, 224),
        ("facebook/dinov3-vits16plus-pretrain-lvd1689m", 28.7, 224),
        ("facebook/dinov3-vitb16-pretrain-lvd1689m", 85.7, 224),
        ("facebook/dinov3-vitl16-pretrain-lvd1689m", 303.1, 224),
        ("facebook/dinov3-vith16plus-pretrain-lvd1689m", 840.6, 224),
        ("facebook/dinov3-vit7b16-pretrain-lvd1689m", 6716.0, 224),
        gated=True,
    ),
    *_rows("DINOv3", "dinov3", DINOV3, ("timm/vit_small_patch16_dinov3.lvd1689m", 21.6, 256)),
    *_rows(
        "MAE",
        "mae",
        APACHE,
        ("facebook/vit-mae-base", 111.9, 224),
        ("facebook/vit-mae-large", 329.5, 224),
        ("facebook/vit-mae-huge", 657.1, 224),
    ),
    *_rows("MSN", "vit", APACHE, ("facebook/vit-msn-small", 21.7, 224), ("facebook/vit-msn-base", 85.8, 224)),
    *_rows("I-JEPA", "vit", NC, ("facebook/ijepa_vith14_1k", 630.8, 224)),
    *_rows(
        "BEiT",
        "beit",
        APACHE,
        ("microsoft/beit-base-patch16-224", 86.5, 224),
        ("microsoft/beit-base-patch16-224-pt22k-ft22k", 102.6, 224),
        ("microsoft/beit-large-patch16-224", 304.4, 224),
        ("facebook/data2vec-vision-base-ft1k", 86.5, 224),
        ("timm/beitv2_base_patch16_224.in1k_ft_in22k_in1k", 86.5, 224),
    ),
    *_rows(
        "EVA-02",
        "eva02",
        MIT,
        ("timm/eva02_tiny_patch14_336.mim_in22k_ft_in1k", 5.8, 336),
        ("timm/eva02_base_patch14_448.mim_in22k_ft_in22k_in1k", 87.1, 448),
        ("timm/eva02_large_patch14_448.mim_m38m_ft_in22k_in1k", 305.1, 448),
    ),
    *_rows("EVA-02", "eva02_clip", MIT, ("timm/eva02_base_patch16_clip_224.merged2b_s8b_b131k", 149.7, 224)),
    *_rows(
        "AIMv2",
        "aimv2",
        "apple-amlr",
        ("apple/aimv2-large-patch14-native", 308.9, 224),
        ("apple/aimv2-large-patch14-224", 309.2, 224),
    ),
    *_rows("AIMv2", "aimv2_lit", "apple-amlr", ("apple/aimv2-large-patch14-224-lit", 436.7, 224)),
    *_rows("PE", "pe", APACHE, ("timm/vit_pe_core_base_patch16_224.fb", 93.7, 224)),
    *_rows(
        "PE",
        "pe_clip",
        APACHE,
        ("facebook/PE-Core-B16-224", 447.7, 224),
        ("facebook/PE-Core-L14-336", 671.1, 336),
        ("timm/PE-Core-B-16", 447.7, 224),
    ),
    *_rows(
        "CLIP",
        "clip",
        MIT,
        ("openai/clip-vit-base-patch32", 151.3, 224),
        ("openai/clip-vit-base-patch16", 149.6, 224),
        ("openai/clip-vit-large-patch14", 427.6, 224),
        ("openai/clip-vit-large-patch14-336", 427.9, 336),
        note="the page states no licence: that of OpenAI's code",
    ),
    *_rows(
        "CLIP",
        "clip",
        MIT,
        ("laion/CLIP-ViT-B-32-laion2B-s34B-b79K", 151.3, 224),
        ("laion/CLIP-ViT-B-16-laion2B-s34B-b88K", 149.6, 224),
        ("laion/CLIP-ViT-L-14-laion2B-s32B-b82K", 427.6, 224),
        ("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", 986.1, 224),
        ("laion/CLIP-ViT-bigG-14-laion2B-39B-b160k", 2539.6, 224),
        ("imageomics/bioclip", 149.6, 224),
    ),
    *_rows(
        "CLIP",
        "clip_vision",
        MIT,
        ("microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224", 86.2, 224),
        note="the image tower alone: its text tower is a BERT",
    ),
    *_rows(
        "MetaCLIP",
        "clip",
        NC,
        ("facebook/metaclip-b32-400m", 151.3, 224),
        ("facebook/metaclip-h14-fullcc2.5b", 986.1, 224),
    ),
    *_rows("MetaCLIP 2", "clip", NC, ("facebook/metaclip-2-worldwide-huge-quickgelu", 1858.8, 224)),
    *_rows(
        "SigLIP",
        "siglip",
        APACHE,
        ("google/siglip-base-patch16-224", 203.2, 224),
        ("google/siglip-base-patch16-256-multilingual", 370.6, 256),
        ("google/siglip-large-patch16-256", 652.2, 256),
        ("google/siglip-so400m-patch14-384", 878.0, 384),
        ("timm/ViT-B-16-SigLIP", 203.2, 224),
    ),
    *_rows(
        "SigLIP 2",
        "siglip",
        APACHE,
        ("google/siglip2-base-patch16-224", 375.2, 224),
        ("google/siglip2-so400m-patch14-384", 1136.0, 384),
    ),
    *_rows("SigLIP 2", "naflex", APACHE, ("google/siglip2-base-patch16-naflex", 375.2, 256)),
    *_rows(
        "Swin",
        "swin",
        APACHE,
        ("microsoft/swin-tiny-patch4-window7-224", 28.3, 224),
        ("microsoft/swin-base-patch4-window7-224", 87.8, 224),
        ("microsoft/swin-large-patch4-window12-384", 196.7, 384),
    ),
    *_rows(
        "Swin V2",
        "swinv2",
        APACHE,
        ("microsoft/swinv2-tiny-patch4-window8-256", 28.3, 256),
        ("microsoft/swinv2-base-patch4-window12to16-192to256-22kto1k-ft", 87.9, 256),
    ),
    *_rows("PVT", "pvt", APACHE, ("Zetatech/pvt-tiny-224", 13.2, 224)),
    *_rows("PVT v2", "pvt_v2", APACHE, ("OpenGVLab/pvt_v2_b0", 3.7, 224)),
    *_rows(
        "ResNet",
        "resnet",
        APACHE,
        ("microsoft/resnet-18", 11.7, 224),
        ("microsoft/resnet-50", 25.6, 224),
        ("timm/resnet50.a1_in1k", 25.6, 224),
        ("timm/resnet50d.ra2_in1k", 25.6, 224),
    ),
    *_rows(
        "EoMT",
        "eomt",
        MIT,
        ("tue-mps/coco_panoptic_eomt_small_640_2x", 24.0, 640),
        ("tue-mps/coco_panoptic_eomt_base_640_2x", 93.7, 640),
        ("tue-mps/coco_panoptic_eomt_large_640", 316.7, 640),
        ("tue-mps/coco_instance_eomt_large_640", 316.7, 640),
        ("tue-mps/ade20k_semantic_eomt_large_512", 316.0, 512),
    ),
    *_rows(
        "YOLOS",
        "yolos",
        APACHE,
        ("hustvl/yolos-tiny", 6.5, (800, 1333)),
        ("hustvl/yolos-small", 30.7, (512, 864)),
        ("hustvl/yolos-base", 127.8, (800, 1344)),
    ),
    *_rows("Depth Anything V2", "dpt", APACHE, ("depth-anything/Depth-Anything-V2-Small-hf", 24.7, 518)),
    *_rows(
        "Depth Anything V2",
        "dpt",
        NC,
        ("depth-anything/Depth-Anything-V2-Base-hf", 97.2, 518),
        ("depth-anything/Depth-Anything-V2-Large-hf", 334.1, 518),
    ),
    HubModel(
        "facebook/dinov3-convnext-tiny-pretrain-lvd1689m",
        "DINOv3",
        "",
        DINOV3,
        gated=True,
        note="convolutional: take facebook/dinov3-vits16-pretrain-lvd1689m",
    ),
    HubModel("facebook/sam-vit-base", "SAM", "", APACHE, note="outlines objects"),
    HubModel("facebook/convnext-tiny-224", "ConvNeXt", "", APACHE, note="convolutional: take a ViT or a ResNet"),
)
BY_NAME = {model.name: model for model in HUB_MODELS}


def list_hub_models(pattern: str = "*") -> HubModels:
    """Models whose name or family matches: with * and ? as a whole, otherwise any part of it."""
    wild = any(c in pattern for c in "*?[")
    pattern = pattern.lower() if wild else f"*{pattern.lower()}*"
    return HubModels(m for m in HUB_MODELS if fnmatch(m.name.lower(), pattern) or fnmatch(m.family.lower(), pattern))
