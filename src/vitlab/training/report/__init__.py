"""What a run looks like: its page in HTML, and figures drawn with matplotlib."""

from vitlab.training.report.figures import draw_preview, picture_kind, plot
from vitlab.training.report.page import RunReport, write_report
from vitlab.training.report.pictures import GalleryItem
from vitlab.training.report.text import duration

__all__ = ["GalleryItem", "RunReport", "draw_preview", "duration", "picture_kind", "plot", "write_report"]
