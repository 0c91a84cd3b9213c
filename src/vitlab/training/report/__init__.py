"""The report of a run in HTML, and figures drawn with matplotlib."""

from vitlab.training.report.figures import draw_preview, picture_kind, plot
from vitlab.training.report.html import GalleryItem, duration
from vitlab.training.report.page import RunReport, write_report

__all__ = ["GalleryItem", "RunReport", "draw_preview", "duration", "picture_kind", "plot", "write_report"]
