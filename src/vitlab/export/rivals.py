"""Other libraries' ways to run the same weights, for bench --against.

transformers   its network, eager, with fused attention
onnxruntime    the network as it is, through torch's exporter, with ONNX Runtime's own optimisation and nothing of ours
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.checkpoints import convert
from vitlab.export.runners import Runner, Workshop, in_onnxruntime

RIVALS = ("transformers", "onnxruntime")


def rival(name: str, model: Any, workshop: Workshop) -> Runner:
    if name == "onnxruntime":
        path = workshop.onnx_file(fold=False)
        return in_onnxruntime("onnxruntime", path)
    return _transformers(model)


def _transformers(model: Any) -> Runner:
    if find_spec("transformers") is None:
        raise ValueError("--against transformers: it is not installed: pip install 'vitlab[compare]'.")
    if not model.config.classes:
        raise ValueError("--against transformers compares classifiers: this model has no classes.")
    from transformers import AutoModelForImageClassification

    with tempfile.TemporaryDirectory() as folder:
        convert.write(model, Path(folder) / "model", "hf")
        theirs: Any = AutoModelForImageClassification.from_pretrained(f"{folder}/model", attn_implementation="sdpa")
    theirs.eval()

    def run(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return theirs(x).logits

    return Runner("transformers", run, sum(p.nbytes for p in theirs.parameters()))
