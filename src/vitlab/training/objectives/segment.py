"""Semantic segmentation: the class of every pixel, judged by mIoU.

    vitlab train seg_folder DATA                              # images/ and masks/; or objects, against the background

Networks of one logit per class and place (linear_head) learn by cross-entropy, networks of queries (eomt) by one mask
for each class of an image.
"""

from vitlab.training.objectives.regions import LearnsRegions
from vitlab.training.report.curves import Chart


class Segmentation(LearnsRegions):
    metric, marks, example = "mIoU", "semantic", "linear_head_small"
    charts = (Chart("Mean IoU", "平均交并比", "miou", percent=True),)
