"""Trackers people use: one small interface, and TensorBoard, MLflow and Weights & Biases behind it.

``fedshift.run(experiment, trackers=[TensorBoard("runs/tensorboard")])`` or ``fedshift run --track tensorboard``.
"""

from fedshift.track.base import Tracker, tracker_of
from fedshift.track.mlflow import MLflow
from fedshift.track.tensorboard import TensorBoard
from fedshift.track.wandb import WandB

__all__ = ["MLflow", "TensorBoard", "Tracker", "WandB", "tracker_of"]
