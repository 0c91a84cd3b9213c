"""Detection: a class and a box for each object, judged by COCO's AP of boxes.

    vitlab train detect_folder DATA                              # COCO JSON, YOLO text, images/ and instances/

Networks of boxes (yolos) learn from boxes alone, by Hungarian matching with their classes and boxes.
"""

from vitlab.training.objectives.regions import LearnsRegions


class Detection(LearnsRegions):
    metric, marks, example = "AP", "detect", "yolos_small"
    charts = ()
