"""From documents in Python to a token file, a trained checkpoint and its tensors.

Usage: documents_to_checkpoint.py [--quick]

The documents could as well be tessera.data.read_parquet("part.parquet") or
tessera.data.read_dataset(datasets.load_dataset(..., streaming=True)): they are taken one at a time.
"""
import argparse
import shutil

import tessera


def documents(count: int):
    """Texts, one after the other."""
    for i in range(count):
        yield f"Document {i}. " + f"A thing of beauty is a joy for ever; its loveliness increases {i % 5} times. " * 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="A few steps only")
    quick = parser.parse_args().quick

    tokenizer = tessera.data.Tokenizer("byte")
    count = tessera.data.write_tokens("documents", documents(50 if quick else 2000), tokenizer=tokenizer)
    print(f"{count} tokens in documents.bin")

    shutil.rmtree("runs/documents", ignore_errors=True)  # otherwise the run would be continued
    config = tessera.Config("tiny", {
        "data": {"tokens": "documents", "sequence_length": 64, "split_documents": True},
        "train": {"steps": 5 if quick else 200, "global_batch": 16},
        "optim.warmup_steps": 2,
        "run.folder": "runs/documents",
    })
    proof = tessera.verify(config.replace({"parallel.ep": 2}), static=True)
    print(f"the layout of 2 ranks is {'proven' if proof else 'wrong'}")
    best = tessera.plan(config, hardware="h100-ib", gpus=2, top=1)["layouts"][0]
    print(f"on two H100: {best['layout']}, {best['tokens_per_second']:,.0f} tokens/s")

    with tessera.Trainer(config) as trainer:
        for metrics in trainer:
            pass
    print(f"step {metrics.step}: loss {metrics.loss:.3f}")

    checkpoint = tessera.read_checkpoint("runs/documents")
    for name, tensor in list(checkpoint.items())[:3]:
        print(f"{name} {tensor.dtype} {list(tensor.shape)}: the first row begins {tensor[0].ravel()[:3]}")


if __name__ == "__main__":
    main()
