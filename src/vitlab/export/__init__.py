"""Export models to torch.export, ONNX and int8. Every file is compared with its model before it is kept.

result = export_model("bundled:cifar10", "model.onnx")   # raises ExportMismatchError if the outputs differ
exported = open_export("model.onnx")                     # vitlab.predict(exported, "cat.jpg")
bench = run_bench("bundled:cifar10")                     # every backend of this machine, timed and compared
"""

from vitlab.export.bench import Bench, run_bench
from vitlab.export.loader import Exported, is_export, open_export, open_network
from vitlab.export.pipeline import ExportMismatchError, export_model
from vitlab.export.verify import Comparison, Verification, verify

__all__ = [
    "Bench",
    "Comparison",
    "ExportMismatchError",
    "Exported",
    "Verification",
    "export_model",
    "is_export",
    "open_export",
    "open_network",
    "run_bench",
    "verify",
]
