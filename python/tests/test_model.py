"""Models score as the program does, and share their weights."""
import json
import pathlib
import subprocess
import sys
import time

import numpy
import pytest
from conftest import TEST_DATA, run_program, same_bits, tiny, weights_of

import tessera

FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v3", "llama"]


@pytest.fixture
def run(folder):
    """A trained model's folder."""
    with tessera.Trainer(tiny(**{"run.folder": "run"})) as trainer:
        list(trainer)
    return folder / "run"


def test_scores_as_the_program(run):
    model = tessera.Model.load(run)
    text = "the sea is not full. " * 40
    pathlib.Path("held.txt").write_text(text)
    printed = json.loads(run_program("eval", run, "--text", "held.txt", "--sequence-length", 16, "--batch-size", 4,
                                     "--device", "cpu", "--json"))
    ids = numpy.array(model.encode(text) + [256])
    windows = (len(ids) - 1) // 16
    rows = numpy.stack([ids[i * 16:i * 16 + 17] for i in range(windows)])
    assert model.loss(rows) == pytest.approx(printed["loss"], rel=2e-2)
    generated = json.loads(run_program("generate", run, "--prompt", "the sea", "--max-tokens", 12, "--seed", 3,
                                       "--device", "cpu", "--json"))
    own = model.generate("the sea", 12, seed=3)
    assert own.ids == [token["id"] for token in generated["tokens"]]
    assert own.logprobs == [token["logprob"] for token in generated["tokens"]]
    assert own.text == generated["text"]


def test_loss_logprobs_and_logits_agree():
    model = tessera.Model(tiny())
    tokens = numpy.random.default_rng(1).integers(0, 256, (3, 19))
    logprobs = model.logprobs(tokens)
    assert logprobs.shape == (3, 18) and logprobs.dtype == numpy.float32
    assert model.loss(tokens) == pytest.approx(-logprobs.mean(), rel=1e-6)
    logits = model.logits(tokens).astype(numpy.float64)
    assert logits.shape == (3, 19, model.vocab_size)
    normal = logits - numpy.log(numpy.exp(logits).sum(-1, keepdims=True))
    wanted = numpy.take_along_axis(normal[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    numpy.testing.assert_allclose(logprobs, wanted, atol=2e-5)
    # Labels that are given mean the same, and -100 leaves tokens out.
    labels = tokens[:, 1:].copy()
    assert numpy.array_equal(model.logprobs(tokens[:, :-1], labels), logprobs)
    labels[:, :9] = -100
    assert numpy.array_equal(model.logprobs(tokens[:, :-1], labels)[:, 9:], logprobs[:, 9:])
    assert model.loss(tokens[:, :-1], labels) == pytest.approx(-logprobs[:, 9:].mean(), rel=1e-6)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "int64", "uint64"])
def test_takes_whole_numbers_of_any_type_and_layout(dtype):
    model = tessera.Model(tiny())
    tokens = numpy.arange(40).reshape(4, 10) % 100
    expected = model.loss(tokens)
    assert model.loss(tokens.astype(dtype)) == expected
    assert model.loss(numpy.asfortranarray(tokens.astype(dtype))) == expected
    assert model.loss(tokens.tolist()) == expected
    assert model.loss(tokens[0]) == model.loss(tokens[:1])


@pytest.mark.parametrize("tokens, message", [
    ([[1]], "at least two"), (numpy.zeros((1, 0), int), "at least two"), (numpy.zeros((0, 5), int), "at least two"),
    ([[1, 2 ** 40]], "beyond 32 bits"), ([[1, -1]], "outside the model's vocabulary"), ([1.5, 2.5], "no whole numbers"),
])
def test_refuses_tokens_that_are_none(tokens, message):
    with pytest.raises(tessera.Error, match=message):
        tessera.Model(tiny()).loss(tokens)


def test_documents_do_not_see_one_another():
    model = tessera.Model(tiny())
    one, other = numpy.arange(8), numpy.arange(50, 62)
    together = model.logprobs(numpy.concatenate([one, other]), documents=numpy.array([4] * 8 + [5] * 12))
    numpy.testing.assert_allclose(together[0, :7], model.logprobs(one)[0], atol=1e-5)
    numpy.testing.assert_allclose(together[0, 8:], model.logprobs(other)[0], atol=1e-5)
    assert together[0, 7] == 0


def test_weights_are_shared_both_ways():
    model = tessera.Model(tiny())
    tokens = numpy.arange(20).reshape(2, 10)
    before = model.loss(tokens)
    weights = model.parameters().numpy()
    again = model.parameters().numpy()
    name = next(iter(weights))
    kept = weights[name].copy()
    weights[name][:] = 0
    assert numpy.all(again[name] == 0)
    assert model.loss(tokens) != before
    weights[name][:] = kept
    assert model.loss(tokens) == before
    del model  # the arrays keep the memory alive
    assert numpy.array_equal(weights[name], kept)


def test_a_trainers_model_moves_with_it():
    with tessera.Trainer(tiny(**{"run.folder": "moving"})) as trainer:
        model = trainer.model
        weights = model.parameters().numpy()
        first = {name: value.copy() for name, value in weights.items()}
        trainer.train_step()
        assert not same_bits(weights, first)
        trainer.save()
        saved = weights_of("moving")
        assert all(numpy.array_equal(saved[name], weights[name]) for name in weights)
    del trainer
    assert model.loss(numpy.arange(10)) > 0


def test_new_models_start_as_trainings_do():
    with tessera.Trainer(tiny(**{"run.folder": "start"})) as trainer:
        assert same_bits(trainer.model.parameters().numpy(), tessera.Model(tiny()).parameters().numpy())


def test_saves_checkpoints_that_others_take(run):
    model = tessera.Model.load(run)
    saved = model.save("copy")
    assert same_bits(weights_of(saved), weights_of(run))
    assert tessera.Model.load("copy").loss([[1, 2, 3]]) == model.loss([[1, 2, 3]])
    run_program("generate", saved, "--prompt", "x", "--max-tokens", 2, "--device", "cpu")
    assert "run" in repr(model) and model.step == 4


def test_does_not_save_beside_a_runs_checkpoints(run):
    with pytest.raises(tessera.Error, match="is the folder of a run"):
        tessera.Model.load(run).save(run)


def test_generates_with_a_callback_and_its_errors(run):
    model = tessera.Model.load(run)
    told = []
    result = model.generate("the", 5, on_token=lambda id, logprob: told.append(id))
    assert told == result.ids and len(told) == 5

    def fail(id, logprob):
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        model.generate("the", 5, on_token=fail)
    with pytest.raises(tessera.Error, match="temperature"):
        model.generate("the", 5, temperature=-1)
    assert len(model.generate([1, 2, 3], 2).ids) == 2
    assert model.generate("", 2).ids


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_of_hugging_face_go_in_and_out(family):
    source = TEST_DATA / "hf" / family
    model = tessera.Model.load(source, device="cpu")
    again = tessera.Model.load(source, device="cpu")
    assert same_bits(model.parameters().numpy(), again.parameters().numpy())
    tokens = numpy.arange(2, 26).reshape(2, 12) % model.vocab_size
    model.save_huggingface("out")
    assert tessera.Model.load("out", device="cpu").loss(tokens) == model.loss(tokens)
    with pytest.raises(tessera.Error, match="out"):
        model.save_huggingface("out")


def test_paths_that_are_none_are_refused():
    with pytest.raises(tessera.Error, match="nowhere"):
        tessera.Model.load("nowhere")
    with pytest.raises(tessera.ConfigError, match="auto, cpu or cuda"):
        tessera.Model.load("nowhere", device="tpu")


def test_import_is_fast_and_light():
    script = ("import sys, tessera; print('numpy' in sys.modules, 'torch' in sys.modules); "
              "print(open('/proc/self/maps').read())")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        bare = time.perf_counter() - start
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - start - 2 * bare)
    assert done.stdout.startswith("False False")
    for library in ("libcuda.so", "libcudnn", "libnccl", "libcublas"):
        assert library not in done.stdout
    assert min(times) < 1  # tens of milliseconds where nothing else runs
