"""Texts and ids become files that train."""
import pathlib
import sys

import numpy
import pytest
from conftest import tiny

import tessera
from tessera import data

TEXTS = [f"document {i}: " + "the sea is not full. " * 20 for i in range(20)]


def train_on(**overrides):
    config = tiny(**{"data.text": "", "train.steps": 1, "run.folder": "run", **overrides})
    with tessera.Trainer(config) as trainer:
        return trainer.train_step().loss


def test_texts_and_ids_give_the_same_tokens():
    tokenizer = data.Tokenizer()
    assert tokenizer.vocab_size == 257 and tokenizer.decode(tokenizer.encode("héllo")) == "héllo"
    count = data.write_tokens("texts", iter(TEXTS), tokenizer=tokenizer)
    ids = [numpy.array(tokenizer.encode(text) + [tokenizer.end_of_document]) for text in TEXTS]
    assert data.write_tokens("ids", ids, vocab_size=257) == count == sum(map(len, ids))
    for ending in ("bin", "idx"):
        assert pathlib.Path(f"texts.{ending}").read_bytes() == pathlib.Path(f"ids.{ending}").read_bytes()
    assert train_on(**{"data.tokens": "texts"}) > 0


def test_jsonl_trains():
    assert data.write_jsonl("texts.jsonl", TEXTS) == 20
    assert train_on(**{"data.text": "texts.jsonl"}) > 0


def test_refuses_what_is_no_document():
    with pytest.raises(tessera.Error, match="outside the vocabulary of 100"):
        data.write_tokens("ids", [[1, 2], [3, 100]], vocab_size=100)
    with pytest.raises(tessera.Error, match="tokenizer"):
        data.write_tokens("ids", TEXTS, vocab_size=257)
    with pytest.raises(tessera.Error, match="vocab_size"):
        data.write_tokens("ids", [[1]])
    assert not pathlib.Path("ids.bin").exists()


def test_parquet_is_read_row_by_row():
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"text": TEXTS, "ids": [[1, 2, 3]] * 20}), "a.parquet", row_group_size=7)
    assert list(data.read_parquet("a.parquet")) == TEXTS
    assert list(data.read_parquet(["a.parquet", pathlib.Path("a.parquet")], batch_rows=3)) == TEXTS + TEXTS
    assert data.write_tokens("ids", data.read_parquet("a.parquet", column="ids"), vocab_size=10) == 60
    with pytest.raises(tessera.Error, match="it has text, ids"):
        list(data.read_parquet("a.parquet", column="words"))


def test_optional_packages_are_asked_for(monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(tessera.Error, match="pip install pyarrow"):
        next(data.read_parquet("a.parquet"))
    with pytest.raises(tessera.Error, match="pip install wandb"):
        tessera.callbacks.WandbCallback()
    with pytest.raises(tessera.Error, match="pip install mlflow"):
        tessera.callbacks.MLflowCallback()


class Rows:
    """What a dataset of Hugging Face's looks like from outside."""

    column_names = ["text"]

    def __iter__(self):
        return ({"text": text} for text in TEXTS)


def test_datasets_are_read_by_column():
    assert list(data.read_dataset(Rows())) == TEXTS
    with pytest.raises(tessera.Error, match="it has text"):
        next(data.read_dataset(Rows(), "words"))
    datasets = pytest.importorskip("datasets")
    assert list(data.read_dataset(datasets.Dataset.from_dict({"text": TEXTS}))) == TEXTS
