"""The report of a run in HTML, and figures drawn with matplotlib."""

from vitlab.training.report.background import Smoothing
from vitlab.training.report.figures import draw_preview, figure_format, plot
from vitlab.training.report.html import GalleryItem, duration
from vitlab.training.report.page import RunReport, write_report
from vitlab.training.report.verdict import Evidence

__all__ = [
    "Evidence",
    "GalleryItem",
    "RunReport",
    "Smoothing",
    "draw_preview",
    "duration",
    "figure_format",
    "plot",
    "write_report",
]
