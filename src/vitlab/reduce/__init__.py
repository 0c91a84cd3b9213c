"""Token reduction: one paper, one file, each a Reducer (layers/reducer.py) for any ViT of vitlab.

model(images, reducer=reducer_of("tome:r=13"))
"""

from vitlab.reduce.evit import EViT
from vitlab.reduce.parse import REDUCERS, for_training, reducer_of
from vitlab.reduce.random_drop import RandomDrop
from vitlab.reduce.schedule import Constant, Decreasing, KeepRatio, Same, Schedule, r_for
from vitlab.reduce.tome import ToMe

__all__ = [
    "REDUCERS",
    "Constant",
    "Decreasing",
    "EViT",
    "KeepRatio",
    "RandomDrop",
    "Same",
    "Schedule",
    "ToMe",
    "for_training",
    "r_for",
    "reducer_of",
]
