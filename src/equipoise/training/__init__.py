"""Training: the loop, its draws, metrics, checkpoints and processes."""

from equipoise.training.describe import Description
from equipoise.training.folder.checkpoint import CheckpointError
from equipoise.training.folder.run_folder import load_model, save_model
from equipoise.training.loop import PrivateTraining
from equipoise.training.metrics import CSVWriter, MLflowWriter, TensorBoardWriter, WandbWriter
from equipoise.training.record_source import DataError
from equipoise.training.step import Result, StepReport

__all__ = [
    "CSVWriter",
    "CheckpointError",
    "DataError",
    "Description",
    "MLflowWriter",
    "PrivateTraining",
    "Result",
    "StepReport",
    "TensorBoardWriter",
    "WandbWriter",
    "load_model",
    "save_model",
]
