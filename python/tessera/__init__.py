"""Tessera trains Mixture-of-Experts language models.

>>> import tessera
>>> config = tessera.Config("tiny", {"data.text": "text.txt", "train.steps": 100})
>>> trainer = tessera.Trainer(config)
>>> for metrics in trainer:
...     print(metrics.step, metrics.loss)
>>> trainer.model.generate("And the LORD said").text

A call is a whole step, or a whole batch: what takes time runs outside of Python, with other threads of Python running
beside it. Arrays come and go by DLPack, so NumPy's, PyTorch's and others' are taken as they are, and weights are
shared without copies.
"""
from . import callbacks, data
from ._tessera import ConfigError, Error, InternalError, OutOfMemoryError, TrainingStopped, __version__
from .checkpoint import Checkpoint, CheckpointTensor, read_checkpoint
from .commands import Verification, plan, verify
from .config import Config
from .model import Generation, Model
from .trainer import StepMetrics, Trainer

__all__ = [
    "Checkpoint", "CheckpointTensor", "Config", "ConfigError", "Error", "Generation", "InternalError", "Model",
    "OutOfMemoryError", "StepMetrics", "Trainer", "TrainingStopped", "Verification", "__version__", "callbacks",
    "data", "plan", "read_checkpoint", "verify",
]
