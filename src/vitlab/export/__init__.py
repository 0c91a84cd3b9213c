"""Export models to torch.export, ONNX and int8. Every file is compared with its model before it is kept.

result = export_model(model, "model.onnx")             # raises ExportMismatchError if the outputs differ
exported = open_export("model.onnx")                   # vitlab.predict(exported, "cat.jpg")
"""

from vitlab.export.loader import Exported, is_export, open_export
from vitlab.export.pipeline import ExportMismatchError, export_model
from vitlab.export.verify import Comparison, Verification, verify

__all__ = [
    "Comparison",
    "ExportMismatchError",
    "Exported",
    "Verification",
    "export_model",
    "is_export",
    "open_export",
    "verify",
]
