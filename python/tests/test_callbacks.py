"""Callbacks are told of each step, and log what loggers take."""
import sys
import types

import pytest
from conftest import tiny

import tessera
from tessera import callbacks


class Recorder(callbacks.Callback):
    def __init__(self):
        self.told = []

    def on_start(self, trainer):
        self.told.append(("start", trainer.step))

    def on_step(self, trainer, metrics):
        self.told.append(("step", metrics.step))

    def on_end(self, trainer):
        self.told.append(("end", trainer.step))


def run(*given):
    with tessera.Trainer(tiny(**{"run.folder": "run"}), callbacks=given) as trainer:
        return list(trainer)


def test_every_step_is_told():
    recorder = Recorder()
    run(recorder)
    assert recorder.told == [("start", 0), ("step", 1), ("step", 2), ("step", 3), ("step", 4), ("end", 4)]


def test_wandb_gets_numbers_and_the_configuration(monkeypatch):
    logged = {}

    class Run:
        def log(self, values, step):
            logged[step] = values

        def finish(self):
            logged["finished"] = True

    fake = types.ModuleType("wandb")
    fake.init = lambda **options: logged.update(options) or Run()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    metrics = run(callbacks.WandbCallback(every=2, project="p"))
    assert logged["project"] == "p" and logged["config"]["train"]["steps"] == 4 and logged["finished"]
    assert logged[2]["loss"] == metrics[1].loss and 1 not in logged
    assert all(isinstance(value, (int, float)) for value in logged[4].values())


def test_mlflow_gets_numbers_and_the_configuration(monkeypatch):
    logged = {}
    fake = types.ModuleType("mlflow")
    fake.start_run = lambda **options: logged.update(options)
    fake.log_params = lambda values: logged.update(params=values)
    fake.log_metrics = lambda values, step: logged.update({step: values})
    fake.end_run = lambda: logged.update(ended=True)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    metrics = run(callbacks.MLflowCallback(run_name="r"))
    assert logged["run_name"] == "r" and logged["params"]["train.steps"] == 4 and logged["ended"]
    assert logged[1]["loss"] == metrics[0].loss
    with pytest.raises(tessera.Error, match="at least 1"):
        callbacks.MLflowCallback(every=0)
