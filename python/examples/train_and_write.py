"""Trains a small model on a text and lets it write: usage train_and_write.py [TEXT] [--quick]

The run is in runs/example, as one of `tessera train` would be: start this again and it continues, or look at
runs/example/report.html.
"""
import argparse
import pathlib

import tessera


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", help="UTF-8 text, JSONL or a folder of these; default: some sentences")
    parser.add_argument("--quick", action="store_true", help="A few steps only")
    options = parser.parse_args()
    if options.text is None:
        options.text = "example.txt"
        sentences = [f"The {i % 13}th river runs into the sea; yet the sea is not full.\n" for i in range(4000)]
        pathlib.Path(options.text).write_text("".join(sentences))

    config = tessera.Config("tiny", {
        "data": {"text": options.text, "sequence_length": 64},
        "train": {"steps": 20 if options.quick else 400, "validation_interval": 10 if options.quick else 100},
        "optim": {"learning_rate": 3e-3, "warmup_steps": 10},
        "run.folder": "runs/example",
    })
    with tessera.Trainer(config) as trainer:
        for metrics in trainer:
            if metrics.validation_loss is not None:
                print(f"step {metrics.step}: loss {metrics.loss:.3f}, validation {metrics.validation_loss:.3f}, "
                      f"{metrics.tokens_per_second:,.0f} tokens/s")

    model = tessera.Model.load("runs/example")
    print(model.generate("The ", max_tokens=80, temperature=0.7).text)


if __name__ == "__main__":
    main()
