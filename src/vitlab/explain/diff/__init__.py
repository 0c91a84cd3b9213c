"""Finds where two copies of a network diverge, and why.

difference = vitlab.explain.diff.diff("runs/flowers/best", "transformers:flowers-hf")
difference.first, difference.cause.words       # "blocks.0.norm1", "LayerNorm eps: 1e-06 in A, 1e-12 in B"
"""

from vitlab.explain.diff.causes import Cause
from vitlab.explain.diff.compare import Difference, diff
from vitlab.explain.diff.steps import StepDifference

__all__ = ["Cause", "Difference", "StepDifference", "diff"]
