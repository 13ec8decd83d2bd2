"""Configurations are the program's."""
import pathlib
import pickle

import numpy
import pytest
from conftest import run_program, tiny

import tessera


def test_values_have_types_and_origins():
    config = tessera.Config("tiny", {"train": {"steps": 7}, "optim.learning_rate": 1e-3, "train.recompute": ["norms"]})
    assert config["train.steps"] == 7
    assert config.to_dict()["optim"]["learning_rate"] == 1e-3
    assert config["train.recompute"] == ["norms"]
    assert config.origins()["train.steps"] == "train.steps"
    assert config.origins()["model.hidden_size"] == "preset tiny"
    with pytest.raises(KeyError):
        config["train.stepz"]


@pytest.mark.parametrize("overrides, message", [
    ({"train.stepz": 3}, "did you mean 'train.steps'"),
    ({"train.steps": "many"}, "train.steps must be an integer"),
    ({"train.steps": 1.5}, "train.steps must be an integer"),
    ({"train.steps": -1}, "train.steps must be from 1"),
    ({"train": {"precision": "f99"}}, "f32"),
    ({"train.steps": {1, 2}}, "is a set"),
    ({"train": {3: 1}}, "train.3 is no key"),
])
def test_refuses_with_the_programs_message(overrides, message):
    with pytest.raises(tessera.ConfigError, match=message):
        tessera.Config("tiny", overrides)
    assert issubclass(tessera.ConfigError, tessera.Error) and issubclass(tessera.ConfigError, ValueError)


def test_takes_scalars_of_numpy():
    config = tessera.Config("tiny", {"train.steps": numpy.int64(7), "optim.learning_rate": numpy.float64(1e-3),
                                     "run.report": numpy.bool_(False), "model.window_layers": [numpy.int32(1)]})
    assert (config["train.steps"], config["optim.learning_rate"]) == (7, 1e-3)
    assert config["run.report"] is False and config["model.window_layers"] == [1]


def test_unknown_preset_names_the_nearest():
    with pytest.raises(tessera.ConfigError, match="did you mean 'tiny'"):
        tessera.Config("tinny")


def test_files_text_and_pickles_give_the_same():
    config = tiny(**{"train.offload": [], "data.end_of_document": ""})
    pathlib.Path("run.toml").write_text(config.to_toml())
    for other in (tessera.Config.from_file("run.toml"), tessera.Config.from_toml(config.to_toml()),
                  pickle.loads(pickle.dumps(config)), config.replace({})):
        assert other == config and hash(other) == hash(config)
    assert config.replace({"train.steps": 9})["train.steps"] == 9
    assert tessera.Config.from_file("run.toml", {"train.steps": 9}) == config.replace({"train.steps": 9})
    with pytest.raises(tessera.ConfigError, match="nowhere.toml"):
        tessera.Config.from_file("nowhere.toml")


def test_the_program_reads_the_same():
    config = tiny()
    pathlib.Path("run.toml").write_text(config.to_toml())
    printed = run_program("train", "run.toml", "--print-config")
    assert tessera.Config.from_toml(printed) == config
