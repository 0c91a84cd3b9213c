"""Exercises that check themselves: write the five parts of a ViT, and hear which mistake gives your numbers.

vitlab learn                           the list, and what is done
vitlab learn attention                 writes attention.py to begin with
vitlab learn attention attention.py    checks it against ours, with copied weights
"""

from vitlab.learn.check import Checked, check
from vitlab.learn.exercises import EXERCISES, Exercise, find
from vitlab.learn.grade import Verdict

__all__ = ["EXERCISES", "Checked", "Exercise", "Verdict", "check", "find"]
