"""Models as files for other programs: torch.export, ONNX, int8; each one is compared with the model before it is kept.

verdict = export_model(model, "model.onnx")            # refused if it says anything else than the model
shipped = open_export("model.onnx")                    # vitlab.predict(shipped, "cat.jpg")
"""

from vitlab.export.opened import Exported, is_export, open_export
from vitlab.export.ship import RefusedError, export_model
from vitlab.export.verify import Verdict, verify

__all__ = ["Exported", "RefusedError", "Verdict", "export_model", "is_export", "open_export", "verify"]
