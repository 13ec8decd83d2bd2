"""PyTorch shares the weights, in one process, whichever is imported first."""
import subprocess
import sys
import textwrap

import pytest
from conftest import tiny

import tessera

torch = pytest.importorskip("torch")


def test_weights_are_shared_in_both_types():
    for precision, dtype in [("f32", torch.float32), ("bf16", torch.bfloat16)]:
        model = tessera.Model(tiny(**{"train.precision": precision}))
        tokens = torch.arange(20).reshape(2, 10)
        before = model.loss(tokens)
        weights = model.parameters().torch()
        name = next(name for name, weight in weights.items() if weight.ndim == 2 and "router" not in name)
        assert weights[name].dtype == dtype
        kept = weights[name].clone()
        weights[name].zero_()
        assert model.loss(tokens) != before
        weights[name].copy_(kept)
        assert model.loss(tokens) == before


def test_tensors_come_back_where_tensors_went():
    model = tessera.Model(tiny())
    tokens = torch.arange(20).reshape(2, 10)
    logprobs = model.logprobs(tokens)
    assert isinstance(logprobs, torch.Tensor) and logprobs.shape == (2, 9)
    logits = model.logits(tokens)
    expected = torch.log_softmax(logits.double(), -1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    assert torch.allclose(logprobs.double(), expected, atol=2e-5)
    # A loss of PyTorch's own on the same logits.
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert model.loss(tokens) == pytest.approx(loss.item(), rel=1e-5)


def test_checkpoints_keep_bf16():
    with tessera.Trainer(tiny(**{"run.folder": "run", "train.precision": "bf16", "train.steps": 1})) as trainer:
        list(trainer)
    checkpoint = tessera.read_checkpoint("run")
    tensor = next(tensor for tensor in checkpoint.values() if tensor.dtype == "bf16")
    assert tensor.torch().dtype == torch.bfloat16
    assert torch.equal(tensor.torch().float(), torch.from_numpy(tensor[...]))


@pytest.mark.parametrize("order", ["torch, tessera", "tessera, torch"])
def test_both_run_in_one_process(order):
    script = textwrap.dedent(f"""
        import {order}
        product = torch.ones(300, 300) @ torch.ones(300, 300)
        assert product[0, 0] == 300
        config = tessera.Config("tiny", {{"data.text": "text.txt", "data.sequence_length": 32, "train.steps": 2,
                                          "run.folder": "x", "run.device": "cpu"}})
        with tessera.Trainer(config) as trainer:
            print([m.loss for m in trainer])
        assert (torch.ones(300, 300) @ torch.ones(300, 300))[0, 0] == 300
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    with tessera.Trainer(tiny(**{"train.steps": 2, "train.global_batch": 8, "train.micro_batch": 8,
                                 "optim.warmup_steps": tessera.Config()["optim.warmup_steps"],
                                 "run.folder": "alone"})) as trainer:
        assert str([m.loss for m in trainer]) == done.stdout.strip()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "llama"])
def test_models_of_transformers_score_alike(family):
    transformers = pytest.importorskip("transformers")
    from conftest import TEST_DATA

    source = TEST_DATA / "hf" / family
    model = tessera.Model.load(source, device="cpu")
    other = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokens = torch.arange(2, 34).reshape(2, 16) % model.vocab_size

    def score(theirs):
        with torch.no_grad():
            logits = theirs(input_ids=tokens).logits.float()
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()

    assert model.loss(tokens) == pytest.approx(score(other), rel=1e-5)
    # What goes out is taken by transformers too.
    model.save_huggingface("out")
    again = transformers.AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32)
    assert score(again) == score(other)


def test_tensors_without_plain_memory_are_resolved_or_named():
    model = tessera.Model(tiny())
    tokens = torch.arange(20).reshape(2, 10)
    assert model.loss(torch._neg_view(-tokens)) == model.loss(tokens)
    for tensor in (tokens.to_sparse(), tokens.to("meta")):
        with pytest.raises(tessera.Error, match="^tokens: expected an array of whole numbers"):
            model.loss(tensor)
