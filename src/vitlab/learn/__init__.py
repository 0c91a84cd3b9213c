"""Exercises with automatic checks: write a ViT, MAE and CLIP, and learn which mistake explains wrong numbers.

vitlab learn                           list the exercises and their state
vitlab learn attention                 write a starter file, attention.py
vitlab learn attention attention.py    check it against our layer, with copied weights
"""

from vitlab.learn.check import ExerciseResult, check
from vitlab.learn.exercises import EXERCISES, Exercise, find, page_links
from vitlab.learn.grade import Grade

__all__ = ["EXERCISES", "Exercise", "ExerciseResult", "Grade", "check", "find", "page_links"]
