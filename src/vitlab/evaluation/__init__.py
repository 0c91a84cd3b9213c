"""vitlab.evaluate: how good a model is on a dataset. The command `vitlab eval` prints what it returns.

result = vitlab.evaluate("bundled:digits", "digits")
result.scores.top(1), result.scores.per_class(), result.scores.calibration_error()
vitlab.evaluate("model.onnx", [("a.png", "cat"), ("b.png", "dog")])  # or a torch Dataset of (image, label)
vitlab.evaluate("bundled:dino", "cifar10", knn=True).knn             # features, against the training images
vitlab.evaluate("bundled:clip", "digits", templates="held_out")      # zero-shot, by the names of the classes
vitlab.evaluate("bundled:clip", "flickr8k/").retrieval.recall(10)    # images with captions
"""

from vitlab.evaluation.evaluate import evaluate
from vitlab.evaluation.result import Evaluation, FewShot, Templates

__all__ = ["Evaluation", "FewShot", "Templates", "evaluate"]
