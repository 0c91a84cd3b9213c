"""What a run looks like: its page in HTML, and figures drawn with matplotlib."""

from vitlab.training.report.figures import draw_preview, picture_kind, plot
from vitlab.training.report.page import write_report
from vitlab.training.report.pictures import Mistake
from vitlab.training.report.text import duration

__all__ = ["Mistake", "draw_preview", "duration", "picture_kind", "plot", "write_report"]
