"""Training, step by step."""
from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import _tessera
from .arrays import token_arrays
from .config import Config, Overrides, native_of
from .model import Model

if TYPE_CHECKING:
    from .callbacks import Callback


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step did. What was not measured is None."""

    step: int  #: steps done, with this one
    total_steps: int  #: train.steps
    tokens_seen: int  #: since the beginning of the run
    loss: float  #: cross-entropy, nats per token
    validation_loss: float | None  #: where validation was due after this step
    mtp_loss: float | None  #: of multi-token prediction, nats per label
    balance_loss: float | None  #: mean of the MoE layers; 1 is perfect balance
    z_loss: float | None
    max_logit: float | None  #: with QK clip: of attention
    grad_norm: float  #: before clipping
    learning_rate: float
    clip_factor: float  #: what gradients were multiplied by
    loss_scale: float | None  #: with FP16: that the step's losses were multiplied by
    seconds: float
    tokens_per_second: float
    tflops: float  #: model FLOPs of the step, 10^12 a second
    utilisation: float | None  #: of the measured peak of matrix products, 0 to 1
    memory_used: int  #: bytes, the highest so far
    dropped_tokens: int  #: assignments to experts that capacity cut off
    skipped_steps: int  #: updates left out so far, since loss or gradient was not finite
    expert_load: dict[int, list[int]]  #: assignments to each expert, by layer

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def scalars(self) -> dict[str, float]:
        """The fields that are numbers, for loggers."""
        return {name: value for name, value in self.as_dict().items()
                if isinstance(value, (int, float)) and name not in ("step", "total_steps")}


def _line_taker(verbose: bool) -> Callable[[str], None]:
    """What is told each line that `tessera train` would print. It must not hold the trainer, which holds it."""

    def take(line: str) -> None:
        if line.startswith("warning: "):
            warnings.warn(line.removeprefix("warning: "), stacklevel=2)
        elif verbose:
            print(line, file=sys.stdout)

    return take


class Trainer:
    """A training run, as `tessera train` does it, whose steps you call.

    It has the run's folder (run.folder) for itself, continues from its newest checkpoint (run.resume), validates and
    saves when that is due, and writes metrics.jsonl, TensorBoard's files and report.html there. `tessera train` with
    the same configuration continues it, and the other way round, with the same bits.

        with tessera.Trainer(config) as trainer:
            for metrics in trainer:
                print(metrics.step, metrics.loss)

    With data.text, data.tokens or data.blend the run has data of its own; without, each step is given a batch.

    Args:
        config: All settings.
        callbacks: Told of each step (tessera.callbacks).
        verbose: Prints what `tessera train` prints. Warnings come as Python's warnings in any case.

    Raises:
        Error: with a message that says what to do, for all that a user can mend.
    """

    def __init__(self, config: Config | Overrides, *, callbacks: Sequence[Callback] = (), verbose: bool = False) -> None:
        self._closed = False
        self._config = config if isinstance(config, Config) else Config(overrides=config)
        self._native = _tessera.make_trainer(native_of(self._config), _line_taker(verbose))
        self._callbacks = list(callbacks)
        try:
            for callback in self._callbacks:
                callback.on_start(self)
        except BaseException:  # nobody has the trainer, but a traceback that is kept would keep its folder
            self._closed = True
            self._native.end()
            raise

    @property
    def config(self) -> Config:
        """The configuration that was given."""
        return self._config

    @property
    def step(self) -> int:
        """Steps done, those before a resume included."""
        return self._native.step_idx

    @property
    def total_steps(self) -> int:
        """train.steps: what the schedule of the learning rate reckons with."""
        return self._native.total_steps

    @property
    def tokens_seen(self) -> int:
        """Tokens of all steps done."""
        return self._native.tokens_seen

    @property
    def is_done(self) -> bool:
        """Whether all steps are done."""
        return self._native.is_done

    @property
    def predicted_bytes(self) -> int:
        """The memory that the run was predicted to take at its peak."""
        return self._native.predicted_bytes

    @property
    def model(self) -> Model:
        """The model that is trained, with the weights as they are now."""
        return Model._wrap(self._native.model(), self)

    def train_step(self, tokens: Any = None, labels: Any = None, documents: Any = None) -> StepMetrics:
        """One optimizer step over train.global_batch sequences, and what is due after it.

        Args:
            tokens: None takes the run's own data. Otherwise [B, S + 1], B = train.global_batch and S =
                data.sequence_length: each token but a row's first is predicted; or [B, S] with labels.
            labels: [B, S]: labels[b, t] is the token that follows tokens[b, t], or -100 for none.
            documents: As of Model.loss; needs data.split_documents = true.

        Raises:
            TrainingStopped: for a NaN or infinite loss or gradient; nothing was updated.
        """
        self._require_open()
        native = self._native
        metrics = StepMetrics(**native.step(*token_arrays(tokens, labels, documents)))
        for callback in self._callbacks:
            callback.on_step(self, metrics)
        return metrics

    def __iter__(self) -> Iterator[StepMetrics]:
        """Trains to the last step with the run's own data, and ends the run."""
        self._require_open()
        if not self._native.has_data:
            raise _tessera.Error("the run has no data to iterate: set data.text, data.tokens or data.blend, or give "
                                 "each train_step a batch")
        while not self.is_done:
            yield self.train_step()
        self.close()

    def evaluate(self) -> float:
        """The loss on the data that the run holds out, in nats per token; NaN where it holds none out."""
        self._require_open()
        return self._native.evaluate()

    def save(self) -> None:
        """Returns when a checkpoint of the state as it is now is on the disk, in run.folder."""
        self._require_open()
        self._native.save()

    def close(self) -> None:
        """Ends the run: saves what it continues from; after the last step also validates and writes the report."""
        if self._closed:
            return
        self._closed = True
        if not self._native.has_ended:  # by an error
            self._native.end()
        for callback in self._callbacks:
            callback.on_end(self)

    def _require_open(self) -> None:
        if self._closed:
            raise _tessera.Error("the trainer is closed; a new one of the same configuration continues the run")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """As close(). Where an error ended the run nothing is saved: its last checkpoint is whole."""
        self.close()

    def __repr__(self) -> str:
        return f"<tessera.Trainer {self._config['run.folder']}, step {self.step} of {self.total_steps}>"
