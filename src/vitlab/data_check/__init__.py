"""The state of a dataset: leaks, copies, likely wrong labels, outliers, unreadable and odd images."""

from vitlab.data_check.check import check, new_folder
from vitlab.data_check.result import CheckResult

__all__ = ["CheckResult", "check", "new_folder"]
