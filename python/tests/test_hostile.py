"""What users pass by mistake, and what they do while a call runs: an error that says why, never a hang."""
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import textwrap
import time

import numpy
import pytest
from conftest import tiny

import tessera
from tessera import data

TOKENS = numpy.arange(20).reshape(2, 10)


def test_other_byte_orders_count():
    model = tessera.Model(tiny())
    expected = model.loss(TOKENS)
    for dtype in (">i8", ">i4", ">u2"):
        assert model.loss(TOKENS.astype(dtype)) == expected
        assert model.loss(TOKENS.astype(dtype), documents=numpy.zeros(TOKENS.shape, dtype)) == expected
    data.write_tokens("big", list(TOKENS.astype(">i4")), vocab_size=100)
    data.write_tokens("own", list(TOKENS), vocab_size=100)
    assert pathlib.Path("big.bin").read_bytes() == pathlib.Path("own.bin").read_bytes()


@pytest.mark.parametrize("tokens", [
    [[1, 2, 3], [1, 2]], "hello", b"hello", [["a", "b"]], [[1, None]], [[1, 2 ** 80]], {"input_ids": [1]}, {1, 2},
    numpy.zeros((2, 3), [("a", "i4")]), numpy.zeros((2, 3), "M8[s]"), iter([1, 2]),
    numpy.ma.masked_array(TOKENS, mask=TOKENS > 5),
])
def test_what_is_no_array_of_numbers_is_named(tokens):
    model = tessera.Model(tiny())
    for call in (model.loss, model.logprobs, model.logits):
        with pytest.raises(tessera.Error, match="^tokens"):
            call(tokens)
    with pytest.raises(tessera.Error, match="^labels"):
        model.loss(TOKENS, labels=tokens)


def test_nothing_to_predict_is_no_loss_of_zero():
    none = numpy.full(TOKENS.shape, -100)
    assert numpy.isnan(tessera.Model(tiny()).loss(TOKENS, none))
    config = tiny(**{"data.text": "", "data.sequence_length": 10, "train.global_batch": 2, "run.folder": "none"})
    with tessera.Trainer(config) as trainer:
        with pytest.raises(tessera.Error, match="nothing is predicted"):
            trainer.train_step(TOKENS, none)
        assert trainer.step == 0


def test_what_numpy_cannot_hold_is_said():
    model = tessera.Model(tiny(**{"train.precision": "bf16"}))
    with pytest.raises(tessera.Error, match=r"take torch\(\)"):
        model.parameters().numpy()
    wide = tessera.Model(tiny(**{"model.vocab_size": 1_000_000, "model.hidden_size": 8, "model.num_layers": 1}))
    with pytest.raises(tessera.Error, match="out of memory: this batch's logits would take 10.*TiB"):
        wide.logits(numpy.zeros((1_500_000, 2), numpy.uint8))


def test_lone_surrogates_are_refused_by_name():
    model = tessera.Model(tiny())
    for call in (model.encode, model.generate, data.Tokenizer().encode,
                 lambda text: data.write_tokens("x", [text], tokenizer=data.Tokenizer()),
                 lambda text: tessera.Config("tiny", {"run.folder": text}),
                 lambda text: tessera.Config("tiny", {"data.blend": ["1", text]}),
                 tessera.Config.from_toml):
        with pytest.raises(tessera.Error, match="is no Unicode"):
            call("a\udcff")


@pytest.mark.parametrize("text", ["é", "😀 a", 'q"uote', "back\\slash", "a,b", "[x]", "\x7f\n\t\x01", "#", " "])
def test_lists_keep_every_text(text):
    config = tessera.Config("tiny", {"data.blend": ["1", text, 2 and "2", "plain"]})
    assert config["data.blend"] == ["1", text, "2", "plain"]
    assert tessera.Config.from_toml(config.to_toml()) == config


@pytest.mark.parametrize("overrides, message", [
    ({"run.folder": b"runs"}, "run.folder is a bytes"),
    ({"data.blend": ["1", b"x"]}, "data.blend has a bytes"),
    ([("train.steps", 1)], "overrides are a list"),
])
def test_values_of_other_types_are_refused(overrides, message):
    with pytest.raises(tessera.ConfigError, match=message):
        tessera.Config("tiny", overrides)


def test_configurations_hold_keys_and_paths():
    config = tessera.Config("tiny", {"data.blend": ["1", pathlib.Path("a b")]})
    assert config["data.blend"] == ["1", "a b"]
    assert "train.steps" in config and "train.stepz" not in config and "train.steps" in list(config)


def test_a_file_is_read_once(tmp_path, monkeypatch):
    pathlib.Path("run.toml").write_text('[model]\npreset = "tiny"\n[train]\nsteps = 7\n')
    config = tessera.Config.from_file("run.toml")
    assert config.origins()["train.steps"] == "run.toml:4"
    pathlib.Path("run.toml").write_text('[model]\npreset = "tiny"\n[train]\nsteps = 9\n')
    assert config.replace({})["train.steps"] == 7
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert pickle.loads(pickle.dumps(config)) == config.replace({}) == config
    assert tessera.verify(config, static=True)


def test_one_text_is_no_list_of_texts():
    with pytest.raises(tessera.Error, match="found one text of 3 characters"):
        data.write_jsonl("x.jsonl", "abc")
    with pytest.raises(tessera.Error, match="found one text of 3 characters"):
        data.write_tokens("x", "abc", tokenizer=data.Tokenizer())
    assert not pathlib.Path("x.jsonl").exists() and not pathlib.Path("x.bin").exists()


@pytest.mark.parametrize("arguments, message", [
    ({"vocab_size": 50, "tokenizer": True}, "the tokenizer has ids up to 256"),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"vocab_size": 5, "prefix": ""}, "expected the name of two files"),
    ({"vocab_size": 5, "prefix": "."}, "expected the name of two files"),
])
def test_token_files_refuse_what_cannot_be(arguments, message):
    values = {"prefix": "x", **arguments}
    if values.pop("tokenizer", False):
        values["tokenizer"] = data.Tokenizer()
    with pytest.raises(tessera.Error, match=message):
        data.write_tokens(values.pop("prefix"), ["a"] if "tokenizer" in values else [[1]], **values)


@pytest.mark.parametrize("dtype", ["bfloat16", "f16", "float32"])
def test_types_of_exports_are_spelt_as_documented(dtype):
    with pytest.raises(tessera.Error, match=f'"{dtype}"; expected f32 or bf16'):
        tessera.Model(tiny()).save_huggingface("out", dtype=dtype)
    assert not pathlib.Path("out").exists()


def test_a_kept_traceback_keeps_no_file():
    def broken():
        yield [1, 2]
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError) as kept:
        data.write_tokens("ids", broken(), vocab_size=10)
    assert kept.tb and data.write_tokens("ids", [[1, 2]], vocab_size=10) == 2

    class Broken(tessera.callbacks.Callback):
        def on_start(self, trainer):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError) as kept:
        tessera.Trainer(tiny(**{"run.folder": "run"}), callbacks=[Broken()])
    assert kept.tb
    tessera.Trainer(tiny(**{"run.folder": "run"})).close()


def test_a_second_trainer_is_told_to_close_the_first():
    first = tessera.Trainer(tiny(**{"run.folder": "run"}))
    with pytest.raises(tessera.Error, match=r"Trainer.close\(\)") as refused:
        tessera.Trainer(tiny(**{"run.folder": "run"}))
    assert "kill" not in str(refused.value)
    first.close()


def test_the_working_folder_may_change(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    with tessera.Trainer(tiny(**{"run.folder": "run", "run.report": True})) as trainer:
        trainer.train_step()
        monkeypatch.chdir(tmp_path / "other")
        for _ in trainer:
            pass
    assert not os.listdir(tmp_path / "other")
    assert (tmp_path / "run" / "report.html").exists()
    assert tessera.read_checkpoint(tmp_path / "run").step == 4


def test_a_call_within_a_call_is_refused():
    model = tessera.Model(tiny())
    with pytest.raises(tessera.Error, match="on_token"):
        model.generate("a", max_tokens=3, on_token=lambda id, logprob: model.loss(TOKENS))
    assert model.loss(TOKENS) > 0
    other = tessera.Model(tiny())
    assert model.generate("a", max_tokens=3, temperature=0, on_token=lambda id, logprob: other.loss(TOKENS)).ids


def run_python(code):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "OMP_NUM_THREADS": "2"}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_fork_is_refused_and_leaves_the_parents_run_alone():
    printed = run_python("""
        import os, tessera
        config = tessera.Config("tiny", {"data.text": "text.txt", "data.sequence_length": 32, "train.steps": 3,
                                         "run.folder": "run", "run.device": "cpu"})
        trainer = tessera.Trainer(config)
        trainer.train_step()
        child = os.fork()
        if child == 0:
            for call in (trainer.train_step, trainer.close, lambda: trainer.model.loss([[1, 2, 3]]),
                         lambda: tessera.Model(config)):
                try:
                    call()
                except tessera.Error as error:
                    print("forked" in str(error), flush=True)
            del trainer
            os._exit(os.path.exists("run/run.lock") - 1)
        assert os.waitpid(child, 0)[1] == 0
        print([metrics.step for metrics in trainer])
    """)
    assert printed == "True\n" * 4 + "[2, 3]\n"


def test_a_fork_before_any_call_computes():
    assert run_python("""
        import os, tessera
        config = tessera.Config("tiny", {"run.device": "cpu"})
        child = os.fork()
        if child == 0:
            print(tessera.Model(config).loss([[1, 2, 3]]) > 0, flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """) == "True\n"


@pytest.mark.parametrize("on_token", ["None", "print_one"])
def test_control_c_ends_a_long_text(on_token):
    code = f"""
        import os, signal, tessera
        def print_one(id, logprob):
            pass
        model = tessera.Model(tessera.Config("tiny", {{"run.device": "cpu"}}))
        model.loss([[1, 2, 3]])
        try:
            print("ready", flush=True)
            model.generate("a", max_tokens=200_000, temperature=0, on_token={on_token})
        except KeyboardInterrupt:
            print(model.loss([[1, 2, 3]]) > 0)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0] == "True\n"
    finally:
        process.kill()
