"""Checkpoints are read by tensors and slices."""
import numpy
import pytest
from conftest import tiny

import tessera


@pytest.fixture(params=["f32", "bf16"])
def checkpoint(request, folder):
    with tessera.Trainer(tiny(**{"run.folder": "run", "train.precision": request.param})) as trainer:
        list(trainer)
    return tessera.read_checkpoint("run")


def test_is_a_mapping_with_a_configuration(checkpoint):
    assert checkpoint.step == 4 and checkpoint.state["step"] == 4
    assert checkpoint.config["train.steps"] == 4
    assert len(checkpoint) == len(list(checkpoint)) > 10
    assert {tensor.group for tensor in checkpoint.values()} == {"model", "optimizer"}
    assert checkpoint.skipped == []
    with pytest.raises(KeyError):
        checkpoint["nothing"]


def test_slices_are_those_of_the_whole(checkpoint):
    name = next(name for name, tensor in checkpoint.items() if len(tensor.shape) == 2)
    tensor = checkpoint[name]
    whole = tensor[...]
    assert whole.shape == tensor.shape and whole.dtype == numpy.float32
    for index in [0, -1, slice(1, 3), (slice(None), 2), (slice(2, 9), slice(1, -1)), (..., 0), (0, 0), slice(3, 3)]:
        assert numpy.array_equal(tensor[index], whole[index]), index
    assert numpy.array_equal(numpy.asarray(tensor), whole)
    for wrong in [whole.shape[0], (0, 0, 0), slice(None, None, 2)]:
        with pytest.raises(IndexError):
            tensor[wrong]


def test_refuses_what_is_no_checkpoint(folder):
    with pytest.raises(tessera.Error, match="does not exist"):
        tessera.read_checkpoint("nowhere")
    with pytest.raises(tessera.Error, match="no complete checkpoint"):
        tessera.read_checkpoint(folder)
