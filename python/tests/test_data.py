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


def test_parquet_of_other_shapes(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    def read(column, **options):
        parquet.write_table(pyarrow.table({"text": column, "b": ["beside"] * len(column)}), tmp_path / "a.parquet",
                            **options)
        return list(data.read_parquet(tmp_path / "a.parquet"))

    assert read(pyarrow.array([], pyarrow.string())) == []
    assert read(pyarrow.nulls(3)) == []
    assert read(["a", None, "", "b"], row_group_size=1) == ["a", "", "b"]
    for kind in (pyarrow.large_string(), pyarrow.string_view(), pyarrow.binary(), pyarrow.large_binary()):
        assert read(pyarrow.array(["é", "b"]).cast(kind)) == ["é", "b"]
    assert read(pyarrow.array(["a", "b", "a"]).dictionary_encode()) == ["a", "b", "a"]
    ids = read(pyarrow.array([[1, 2], [], None, [3]], pyarrow.list_(pyarrow.int32())))
    assert ids == [[1, 2], [], [3]]
    assert data.write_tokens(tmp_path / "ids", ids, vocab_size=10) == 3

    damaged = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, pyarrow.py_buffer(bytes([0] * 4 + [2, 0, 0, 0])),
                                                               pyarrow.py_buffer(b"\xff\xfe")])
    for column, message in ((damaged, "row 0 of \"text\" is not valid UTF-8"), ([b"ok", b"\xff"], "row 1 of .*UTF-8"),
                            ([[1], [2, None]], "row 1 of \"text\" has a null among its ids"),
                            ([{"a": "x"}], "is of the type struct"), ([1, 2], "is of the type int64"),
                            ([["a"]], "is of the type list"), ([[1.5]], "is of the type list"),
                            ([[True]], "is of the type list"), ([[[1]]], "is of the type list")):
        with pytest.raises(tessera.Error, match=message):
            read(column)


def test_broken_parquet_is_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    whole = tmp_path / "whole.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS}), whole)
    content = whole.read_bytes()
    for name, part in (("empty", b""), ("junk", b"x" * 100), ("cut", content[:-20]),
                       ("damaged", content[:10] + bytes([170]) * 50 + content[60:])):
        (tmp_path / name).write_bytes(part)
        with pytest.raises(tessera.Error, match=f"{name} cannot be read as parquet"):
            list(data.read_parquet(tmp_path / name))
    for name in ("missing", "."):
        with pytest.raises(tessera.Error, match="cannot be read as parquet"):
            list(data.read_parquet(tmp_path / name))
    with pytest.raises(tessera.Error, match="batch_rows is 0"):
        list(data.read_parquet(whole, batch_rows=0))
    pair = pyarrow.Table.from_arrays([pyarrow.array(["1"]), pyarrow.array(["2"])], names=["text", "text"])
    parquet.write_table(pair, whole)
    with pytest.raises(tessera.Error, match="has 2 columns \"text\""):
        list(data.read_parquet(whole))


def test_documents_that_are_none_are_refused(tmp_path):
    assert data.write_tokens(tmp_path / "ids", [[1, 2], [], (3,), range(4)], vocab_size=10) == 7
    for document in (b"bytes", {"a": 1}, ["a"], [1, None], [[1], [2, 3]], 5, None):
        with pytest.raises(tessera.Error, match="document 1 is .*expected a text, or ids"):
            data.write_tokens(tmp_path / "ids", [[1], document], vocab_size=10)
    with pytest.raises(tessera.Error, match="no whole numbers"):
        data.write_tokens(tmp_path / "ids", [[1.5]], vocab_size=10)
    for text in (b"bytes", None, 5, "\ud800"):
        with pytest.raises(tessera.Error, match="text 1 is"):
            data.write_jsonl(tmp_path / "a.jsonl", ["a", text])
    assert not list(tmp_path.glob("a.jsonl*"))


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
    assert list(data.read_dataset([{"text": "a"}, {"text": None}])) == ["a"]
    with pytest.raises(tessera.Error, match="it has text"):
        next(data.read_dataset(Rows(), "words"))
    datasets = pytest.importorskip("datasets")
    assert list(data.read_dataset(datasets.Dataset.from_dict({"text": TEXTS}))) == TEXTS
