"""Training: the loop, its draws, metrics, checkpoints and processes."""

from equipoise._files import CheckpointError
from equipoise.training.arguments import Data, Record, Run, Users
from equipoise.training.describe import Description
from equipoise.training.folder.run_folder import load_model, save_model
from equipoise.training.loop import PrivateTraining
from equipoise.training.metrics import CSVWriter, Events, MLflowWriter, TensorBoardWriter, WandbWriter
from equipoise.training.record_source import DataError
from equipoise.training.scores import Metric, Score
from equipoise.training.stages import Stage
from equipoise.training.step import Result, StepReport

__all__ = [
    "CSVWriter",
    "CheckpointError",
    "Data",
    "DataError",
    "Description",
    "Events",
    "MLflowWriter",
    "Metric",
    "PrivateTraining",
    "Record",
    "Result",
    "Run",
    "Score",
    "Stage",
    "StepReport",
    "TensorBoardWriter",
    "Users",
    "WandbWriter",
    "load_model",
    "save_model",
]
