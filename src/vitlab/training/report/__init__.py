"""The report of a run in HTML, and figures drawn with matplotlib."""

from vitlab.training.report.figures import draw_preview, figure_format, plot
from vitlab.training.report.html import GalleryItem, duration
from vitlab.training.report.page import RunReport, write_report

__all__ = ["GalleryItem", "RunReport", "draw_preview", "duration", "figure_format", "plot", "write_report"]
