"""What is told of each step of a Trainer."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _tessera

if TYPE_CHECKING:
    from .trainer import StepMetrics, Trainer


class Callback:
    """Override what you need. An exception ends the training step's call, after the step is done."""

    def on_start(self, trainer: Trainer) -> None:
        """The run is open: new, or continued after trainer.step steps."""

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """A step and what was due after it are done."""

    def on_end(self, trainer: Trainer) -> None:
        """The run was closed."""


class _Flat(Callback):
    """For loggers of numbers: every `every`-th step, and those with a validation."""

    def __init__(self, every: int) -> None:
        if every < 1:
            raise _tessera.Error(f"every is {every}; expected at least 1")
        self._every = every

    def _is_due(self, metrics: StepMetrics) -> bool:
        return metrics.step % self._every == 0 or metrics.validation_loss is not None


class WandbCallback(_Flat):
    """Logs steps to Weights & Biases, with the configuration. Needs `pip install wandb`.

    Args:
        every: Steps between two that are logged.
        init: Arguments of wandb.init, such as project, name or mode.
    """

    def __init__(self, every: int = 1, **init: Any) -> None:
        super().__init__(every)
        try:
            import wandb
        except ImportError as error:
            raise _tessera.Error("WandbCallback needs Weights & Biases: pip install wandb") from error
        self._wandb = wandb
        self._init = init
        self._run: Any = None

    def on_start(self, trainer: Trainer) -> None:
        self._run = self._wandb.init(**{"config": trainer.config.to_dict(), **self._init})

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if self._is_due(metrics):
            self._run.log(metrics.scalars(), step=metrics.step)

    def on_end(self, trainer: Trainer) -> None:
        self._run.finish()


class MLflowCallback(_Flat):
    """Logs steps to MLflow, with the configuration. Needs `pip install mlflow`.

    Args:
        every: Steps between two that are logged.
        start: Arguments of mlflow.start_run, such as run_name or experiment_id.
    """

    def __init__(self, every: int = 1, **start: Any) -> None:
        super().__init__(every)
        try:
            import mlflow
        except ImportError as error:
            raise _tessera.Error("MLflowCallback needs MLflow: pip install mlflow") from error
        self._mlflow = mlflow
        self._start = start

    def on_start(self, trainer: Trainer) -> None:
        self._mlflow.start_run(**self._start)
        flat = {f"{section}.{key}": value for section, values in trainer.config.to_dict().items()
                for key, value in values.items()}
        self._mlflow.log_params(flat)

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if self._is_due(metrics):
            self._mlflow.log_metrics({name: float(value) for name, value in metrics.scalars().items()},
                                     step=metrics.step)

    def on_end(self, trainer: Trainer) -> None:
        self._mlflow.end_run()
