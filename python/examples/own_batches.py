"""Trains on batches made in Python, here sums such as "12+34=46;": usage own_batches.py [--quick]

Only the digits behind "=" are predicted: labels[b, t] is the token that follows tokens[b, t], and -100 leaves a token
out. Afterwards the weights are looked at as NumPy arrays, which share the trainer's memory.
"""
import argparse
import shutil

import numpy

import tessera

LENGTH = 64  # tokens of a sequence


def make_batch(random: numpy.random.Generator, rows: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Tokens and labels, each [rows, LENGTH]."""
    texts = []
    for _ in range(rows):
        sums = ""
        while len(sums) <= LENGTH:
            one, other = random.integers(0, 50, 2)
            sums += f"{one}+{other}={one + other};"
        texts.append(numpy.frombuffer(sums[:LENGTH + 1].encode(), numpy.uint8))
    ids = numpy.stack(texts).astype(numpy.int64)
    tokens, labels = ids[:, :-1], ids[:, 1:].copy()
    is_result = numpy.zeros(tokens.shape, bool)
    for row in range(rows):
        inside = False
        for column in range(LENGTH):
            inside = (inside or tokens[row, column] == ord("=")) and tokens[row, column] != ord(";")
            is_result[row, column] = inside
    labels[~is_result] = -100
    return tokens, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="A few steps only")
    steps = 20 if parser.parse_args().quick else 600

    shutil.rmtree("runs/sums", ignore_errors=True)  # otherwise the run would be continued
    config = tessera.Config("tiny", {
        "data.sequence_length": LENGTH,
        "train": {"steps": steps, "global_batch": 16, "micro_batch": 16},
        "optim": {"learning_rate": 3e-3, "warmup_steps": 10},
        "run.folder": "runs/sums",
    })
    random = numpy.random.default_rng(1)
    with tessera.Trainer(config) as trainer:
        while not trainer.is_done:
            metrics = trainer.train_step(*make_batch(random, 16))
            if metrics.step % (steps // 4) == 0:
                print(f"step {metrics.step}: loss {metrics.loss:.3f} of the results' digits")
        tokens, labels = make_batch(random, 64)
        print(f"new sums: loss {trainer.model.loss(tokens, labels):.3f}")
        for name, weight in list(trainer.model.parameters().numpy().items())[:3]:
            print(f"{name} {list(weight.shape)}: deviation {weight.std():.4f}")


if __name__ == "__main__":
    main()
