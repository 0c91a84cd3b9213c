"""Instance segmentation: a class and a mask for each object, judged by COCO's AP of masks.

    vitlab train instance_folder DATA                              # images/ and instances/, COCO JSON, YOLO polygons

Each object is given to one query by Hungarian matching, and compared with its class and mask (models/set_loss.py).
"""

from vitlab.training.objectives.regions import LearnsRegions
from vitlab.training.report.curves import Chart


class InstanceSegmentation(LearnsRegions):
    metric, marks, example = "AP", "instance", "eomt_small"
    charts = (
        Chart("Average precision", "平均精度", "ap", percent=True),
        Chart("Average precision at IoU 0.5", "IoU 0.5 的平均精度", "ap50", percent=True),
        Chart("Panoptic quality", "全景质量", "pq", percent=True),
    )
