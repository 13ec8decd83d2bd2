"""Training by Python gives the program's bits."""
import gc
import gzip
import io
import pathlib
import subprocess
import sys
import textwrap
import threading
import warnings

import numpy
import pytest
from conftest import interrupt, run_program, same_bits, tiny, weights_of

import tessera


def train(config, **options):
    with tessera.Trainer(config, **options) as trainer:
        return list(trainer)


@pytest.mark.parametrize("overrides", [
    {},
    {"train.precision": "bf16", "train.validation_interval": 2},
    {"optim.name": "muon", "data.split_documents": True},
])
def test_trains_to_the_bits_of_the_program(overrides):
    config = tiny(**overrides)
    metrics = train(config.replace({"run.folder": "python"}))
    pathlib.Path("run.toml").write_text(config.replace({"run.folder": "program"}).to_toml())
    run_program("train", "run.toml")
    for group in ("model", "optimizer"):
        assert same_bits(weights_of("python", group), weights_of("program", group))
    assert [m.step for m in metrics] == [1, 2, 3, 4]
    assert metrics[-1].loss < metrics[0].loss
    assert all(m.tokens_seen == 4 * 32 * m.step for m in metrics)
    if "train.validation_interval" in overrides:
        assert [m.validation_loss is not None for m in metrics] == [False, True, False, True]


def test_own_batches_give_the_bits_of_the_runs_data():
    config = tiny(**{"run.folder": "own", "data.validation_fraction": 0})
    ids = numpy.frombuffer(pathlib.Path("text.txt").read_bytes(), dtype=numpy.uint8)
    rows = numpy.stack([ids[i * 40:i * 40 + 33] for i in range(16)]).reshape(4, 4, 33)
    given = config.replace({"data.text": "", "run.folder": "given"})
    with tessera.Trainer(given) as trainer:
        losses = [trainer.train_step(rows[i]).loss for i in range(4)]
        with pytest.raises(tessera.Error, match="all 4 steps"):
            trainer.train_step(rows[0])
    with tessera.Trainer(given.replace({"run.folder": "labels"})) as trainer:
        with_labels = [trainer.train_step(rows[i][:, :-1], rows[i][:, 1:]).loss for i in range(4)]
    with tessera.Trainer(config) as trainer:
        beside_data = [trainer.train_step(rows[i].astype(numpy.int64)).loss for i in range(4)]
    assert losses == with_labels == beside_data
    assert same_bits(weights_of("given"), weights_of("labels"))
    assert same_bits(weights_of("given"), weights_of("own"))


def test_refuses_batches_that_do_not_fit():
    config = tiny(**{"run.folder": "given"})
    rows = numpy.arange(4 * 33).reshape(4, 33) % 250
    with tessera.Trainer(config) as trainer:
        for tokens, labels, message in [
            (rows[:3], None, "4 sequences of 32 tokens"),
            (rows[:, :20], None, "4 sequences of 32 tokens"),
            (rows + 300, None, "outside the model's vocabulary"),
            (rows[:, :32], rows[:, :32], "labels are the tokens themselves"),
            (rows[:, :32], rows[:, :31], "labels have the shape"),
            (rows.astype(numpy.float32), None, "no whole numbers"),
            (rows[None], None, "expected \\[sequences, tokens\\]"),
        ]:
            with pytest.raises(tessera.Error, match=message):
                trainer.train_step(tokens, labels)
        with pytest.raises(tessera.Error, match="split_documents"):
            trainer.train_step(rows, documents=numpy.zeros_like(rows))
        assert trainer.step == 0
        assert trainer.train_step(rows).step == 1
    with tessera.Trainer(config.replace({"data.text": "", "run.folder": "none"})) as trainer:
        with pytest.raises(tessera.Error, match="no data"):
            trainer.train_step()
        with pytest.raises(tessera.Error, match="no data"):
            next(iter(trainer))


def test_documents_are_apart():
    config = tiny(**{"run.folder": "a", "data.split_documents": True, "data.text": ""})
    rows = numpy.arange(4 * 33).reshape(4, 33) % 250
    documents = numpy.repeat([[0] * 10 + [1] * 23], 4, axis=0)
    with tessera.Trainer(config) as trainer:
        expected = trainer.model.loss(rows, documents=documents)
        assert trainer.train_step(rows, documents=documents).loss == pytest.approx(expected, rel=1e-6)


def test_stops_and_continues():
    config = tiny(**{"run.folder": "whole"})
    train(config)
    for step in (2, 4):
        with tessera.Trainer(config.replace({"run.folder": "parts"})) as trainer:
            while trainer.step < step:
                trainer.train_step()
    assert trainer.is_done
    assert same_bits(weights_of("parts"), weights_of("whole"))
    with pytest.raises(tessera.Error, match="closed"):
        trainer.train_step()
    # The program goes on from what Python saved, and Python from what the program did.
    with tessera.Trainer(config.replace({"run.folder": "both"})) as trainer:
        trainer.train_step()
        trainer.save()
    pathlib.Path("run.toml").write_text(config.replace({"run.folder": "both"}).to_toml())
    run_program("train", "run.toml")
    assert same_bits(weights_of("both"), weights_of("whole"))


def test_one_trainer_has_the_folder():
    config = tiny(**{"run.folder": "runs/one"})
    with tessera.Trainer(config):
        with pytest.raises(tessera.Error, match="runs/one"):
            tessera.Trainer(config)


def test_an_error_leaves_the_interpreter_and_the_folder():
    config = tiny(**{"run.folder": "wild", "optim.learning_rate": 1e30, "train.steps": 50, "optim.warmup_steps": 0})
    with pytest.raises(tessera.TrainingStopped, match="step"):
        train(config)
    gc.collect()
    with tessera.Trainer(config.replace({"optim.learning_rate": 1e-3, "train.steps": 1})) as trainer:
        trainer.train_step()


def test_evaluates_and_warns_and_prints(capsys):
    with tessera.Trainer(tiny(**{"run.folder": "seen", "run.log_interval": 1}), verbose=True) as trainer:
        trainer.train_step()
        assert 4 < trainer.evaluate() < 7
    assert "parameters" in capsys.readouterr().out
    with warnings.catch_warnings(record=True):
        with tessera.Trainer(tiny(**{"run.folder": "quiet"})) as trainer:
            trainer.train_step()
    assert capsys.readouterr().out == ""


def test_other_threads_run_beside_a_step():
    counted = threading.Event()
    with tessera.Trainer(tiny(**{"run.folder": "threads"})) as trainer:
        thread = threading.Thread(target=counted.set)
        losses = []
        workers = [threading.Thread(target=lambda: losses.append(trainer.train_step().loss)) for _ in range(4)]
        for worker in [*workers, thread]:
            worker.start()
        for worker in workers:
            worker.join()
    assert counted.is_set() and len(losses) == 4


def test_ctrl_c_is_a_keyboard_interrupt_after_a_whole_step():
    script = textwrap.dedent("""
        import os, signal, threading, tessera
        config = tessera.Config("tiny", {"data.text": "text.txt", "data.sequence_length": 32, "train.steps": 100000,
                                         "run.folder": "stopped", "run.device": "cpu"})
        trainer = tessera.Trainer(config)
        threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            for metrics in trainer:
                pass
        except KeyboardInterrupt:
            trainer.close()
            print("stopped", trainer.step)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    step = int(done.stdout.split()[1])
    assert step > 0 and tessera.read_checkpoint("stopped").step == step


def test_ctrl_c_ends_tokenizing(folder):
    part = gzip.compress(b"and the waters returned from off the earth continually\n" * 500_000)
    pathlib.Path("long.txt.gz").write_bytes(part * 60)
    printed, seconds = interrupt("""
        import pathlib, tessera
        settings = {"data.sequence_length": 32, "train.steps": 1, "run.folder": "long", "run.device": "cpu"}
        print("ready", flush=True)
        try:
            tessera.Trainer(tessera.Config("tiny", {**settings, "data.text": "long.txt.gz"}))
        except KeyboardInterrupt:
            print("stopped", list(pathlib.Path("long/tokens").glob("*.idx")))
        with tessera.Trainer(tessera.Config("tiny", {**settings, "data.text": "text.txt"})) as trainer:
            print(next(iter(trainer)).step)
    """, lambda: any(folder.glob("long/tokens/*.partial/tokens")))
    assert printed == "stopped []\n1\n" and seconds < 10


def test_what_is_raised_where_a_line_is_told_is_raised(monkeypatch):
    class Stopped(io.StringIO):
        def write(self, text):
            raise KeyboardInterrupt

    config = tiny(**{"run.folder": "told"})
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Stopped())
        with pytest.raises(KeyboardInterrupt):
            tessera.Trainer(config, verbose=True)
    with tessera.Trainer(config) as trainer:  # the folder is free
        assert next(iter(trainer)).step == 1


def test_refuses_to_be_one_of_several_ranks(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost",
                        "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(tessera.Error, match="Python trains on one rank"):
        tessera.Trainer(tiny())


def test_trainers_leave_nothing_behind():
    script = textwrap.dedent("""
        import tessera
        config = tessera.Config("tiny", {"data.text": "text.txt", "data.sequence_length": 32, "train.steps": 2,
                                         "run.folder": "x", "run.device": "cpu"})
        trainer = tessera.Trainer(config)
        parameters = trainer.model.parameters()
        for metrics in trainer:
            pass
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "leaked" not in done.stderr, done.stderr
