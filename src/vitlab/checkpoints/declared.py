"""What the config beside weights says a network is: named in every refusal, with what is known and what to do.

transformers' config.json has a model_type, timm's an architecture; open_clip_config.json names its two towers.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vitlab.checkpoints.family import Family
from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.schema import abbreviated
from vitlab.errors import CheckpointError
from vitlab.parsing import is_object

CONVOLUTIONAL = "a convolutional network. Of those only ResNets are read: take the ViT of the same release"
DEPTH = "a depth estimator on another network's encoder. Load that encoder from its own repository, e.g. DINOv2's"
DETECTOR = "a network that finds or outlines objects. Load the encoder that it was made from"
LANGUAGE = "a language model that reads images. Load its image encoder from that one's own repository"
VIDEO = "a network for video. Only networks for single images are read"
TEXT = "a text tower alone. Load the model that it was taken from, which has both towers"
NOT_READ = {  # regex of a model_type or architecture -> what it is, and what to do instead
    r"(dinov3_|)convnext.*|(tf_|)efficientnet.*|(tf_|)mobilenet.*|regnet.*|resnext.*|densenet.*|vgg.*|inception.*": (
        CONVOLUTIONAL
    ),
    r"bit|levit.*|cvt|focalnet.*|poolformer.*|mobilevit.*|nfnet.*|dm_nfnet.*|seresnet.*|rexnet.*": CONVOLUTIONAL,
    r"prompt_depth_anything|dpt|zoedepth|glpn|depth_pro": DEPTH,
    r"sam|sam[23].*|sam_hq|samvit.*|.*detr.*|mask2former|maskformer|oneformer|vitdet": DETECTOR,
    r"(.*_)?(llava|idefics|blip|instructblip).*|qwen.*|paligemma.*|gemma.*|mllama|internvl.*": LANGUAGE,
    r"pixtral|kosmos.*|smolvlm.*|git|vision-encoder-decoder|florence.*|molmo.*|phi.*": LANGUAGE,
    r"(clip|siglip2?|metaclip_2|aimv2|tipsv2|altclip|chinese_clip)_text_model": TEXT,
    r"videomae|timesformer|vivit|vjepa.*|x-?clip": VIDEO,
}


@dataclass(frozen=True)
class Declared:
    """What a config says; `field` and `name` as they stand in `file`."""

    file: str
    library: str
    field: str
    name: str
    encoder: str = ""  # the model_type of the vision_config inside

    def __str__(self) -> str:
        return f"{self.file} has {self.field} {abbreviated(self.name)}"

    @property
    def what(self) -> str:
        """In words, with what to do instead; empty where nothing is known of it."""
        advice = next((advice for pattern, advice in NOT_READ.items() if re.fullmatch(pattern, self.name)), "")
        return f"{advice} (it has a {self.encoder})" if advice == LANGUAGE and self.encoder else advice


def declared_by(path: Path) -> Declared | None:
    """What the config in a folder, or beside a file, says; None where there is none that can be read."""
    folder = path if path.is_dir() else path.parent
    for file in ("open_clip_config.json", "config.json"):
        if not (folder / file).is_file():
            continue
        try:
            config = read_json(folder / file)
        except CheckpointError:  # its reader says what is wrong with it
            return None
        if file == "open_clip_config.json":
            name = _open_clip_tower(config)
            return Declared(file, "open_clip", "the image tower", name) if name else None
        for field, library in (("architecture", "timm"), ("model_type", "transformers")):
            name = config.get(field)
            if isinstance(name, str) and name:
                return Declared(file, library, field, name, _inner_type(config))
    return None


def _open_clip_tower(config: dict[str, object]) -> str:
    model = config.get("model_cfg")
    vision = model.get("vision_cfg") if is_object(model) else None
    name = vision.get("timm_model_name") if is_object(vision) else None
    return name if isinstance(name, str) else ""


def _inner_type(config: dict[str, object]) -> str:
    vision = config.get("vision_config")
    name = vision.get("model_type") if is_object(vision) else None
    return name if isinstance(name, str) else ""


def known_names(library: str, families: Mapping[str, Family]) -> str:
    """transformers' model_types, or the families that are read in another library's layout."""
    if library == "transformers":
        return ", ".join(dict.fromkeys(name for family in families.values() for name in family.model_types))
    return ", ".join(
        family.name for family in families.values() if any(dialect.name == library for dialect in family.dialects)
    )


def check_known(path: Path, families: Mapping[str, Family]) -> None:
    """Refuse a model_type that no family has before its weights, which may be large, are read."""
    declared = declared_by(path)
    if declared is None or declared.field != "model_type":
        return
    if not any(declared.name in family.model_types for family in families.values()):
        raise CheckpointError(f"{path}: {refusal(declared, families)}")


def refusal(declared: Declared, families: Mapping[str, Family]) -> str:
    """Why a network is not read, and which are."""
    if any(declared.name in family.model_types for family in families.values()):
        return f"{declared}, but the weights are none of such a network."
    readable = known_names(declared.library, families)
    if declared.what:
        return f"{declared}, {declared.what}. Known of {declared.library}: {readable}."
    return f"{declared}; known are {readable} (of {declared.library})."


@contextmanager
def naming_network(path: Path) -> Generator[None]:
    """Errors about a checkpoint also say what its config calls the network."""
    try:
        yield
    except CheckpointError as error:
        declared = declared_by(path) if path.is_dir() else None
        if declared is None or declared.name in str(error):
            raise
        raise CheckpointError(f"{error} ({declared}.)") from None
