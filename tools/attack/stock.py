"""The tiny model that is attacked: its command line, and finished runs that cases copy and damage."""
import glob
import hashlib
import json
import os
import re
import shutil

from attack.harness import Box, Case, Limits, expect

NUM_RANKS = 4
SPREAD = ["--parallel.tp=2", "--parallel.ep=2"]
FIRST, SECOND, LAST = 5, 10, 15  # steps of the stock run's checkpoints, and where a continued one ends

MODEL = ["--model.hidden_size=16", "--model.num_layers=2", "--model.num_heads=2", "--model.vocab_size=320",
         "--moe.num_experts=4", "--moe.inner_size=16", "--data.sequence_length=16", "--train.micro_batch=1",
         "--train.global_batch=4"]
QUIET = ["--run.report=false", "--run.tensorboard=false", "--run.log_interval=1", "--run.device=cpu"]
DENSE = ["--moe.num_experts=0", "--moe.top_k=1"]


def train(text, folder, steps, *options):
    """Arguments of a training: the learning rate does not depend on the number of steps, so that a run which is
    stopped and continued to another number has the bits of an unbroken one."""
    return ["train", f"--data.text={text}", f"--run.folder={folder}", f"--train.steps={steps}", *MODEL, *QUIET,
            "--train.validation_interval=0", "--optim.schedule=constant", *options]


def write_text(path, draw, num_words):
    words = ["".join(draw.choice("abcdefghij") for _ in range(draw.randint(2, 9))) for _ in range(300)]
    with open(path, "w", encoding="ascii") as file:
        for start in range(0, num_words, 12):
            count = min(12, num_words - start)
            file.write(" ".join(draw.choice(words) for _ in range(count)) + "\n")


def checkpoints(run):
    """The checkpoints of a run's folder, the oldest first."""
    return sorted(glob.glob(os.path.join(glob.escape(run), "checkpoints", "step-*")))


def last_step(run):
    found = checkpoints(run)
    return int(found[-1].rsplit("-", 1)[1]) if found else 0


def digest(checkpoint):
    """A hash of the weights and of the optimizer's state in a checkpoint."""
    total = hashlib.sha256()
    for path in sorted(glob.glob(os.path.join(glob.escape(checkpoint), "*.safetensors"))):
        total.update(os.path.basename(path).encode())
        with open(path, "rb") as file:
            total.update(file.read())
    return total.hexdigest()


def final_digest(run):
    found = checkpoints(run)
    return digest(found[-1]) if found else "no checkpoint"


def require_digest(finished, run, step, expected):
    """The run has ended at `step` with the weights of the unbroken one."""
    name = os.path.join(run, "checkpoints", f"step-{step:08d}")
    if not os.path.isdir(name):
        raise finished.fault(f"a checkpoint of step {step}", found=f"{finished.ended()}, newest is {last_step(run)}")
    if digest(name) != expected:
        raise finished.fault("the weights of the unbroken run", found=f"other weights at step {step}")


def steps_of(run):
    """The steps in metrics.jsonl, in their order."""
    with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return [record["step"] for record in records if record["type"] == "step"]


class Stock:
    """Finished runs and files, made once: a run with the checkpoints of steps 5 and 10 (`run`), the weights it has
    when continued to step 15, a dense run, Hugging Face models, a tokenizer, token files and texts."""

    def __init__(self, attack, folder):
        self.folder = folder
        self.box = Box(attack, Case("stock", "stock", None, seconds=600), folder)
        self.text = self.path("text.txt")
        write_text(self.text, self.box.random, 6_000)
        self._make_runs()
        self._make_models()

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def make(self, *arguments):
        return expect(self.box.run(*arguments, seconds=300), codes=(0,))

    def _make_runs(self):
        save = f"--run.checkpoint_interval={FIRST}"
        self.run = self.path("run")
        self.make(*train(self.text, self.run, SECOND, save))
        whole = self.path("whole")
        shutil.copytree(self.run, whole)
        self.make(*train(self.text, whole, LAST, save))
        self.expected = final_digest(whole)
        self.dense = self.path("dense")
        self.make(*train(self.text, self.dense, 2, *DENSE))
        newest, older = checkpoints(self.run)[::-1]
        self.loss_newest, self.loss_older = self.loss(newest), self.loss(older)

    def loss(self, checkpoint):
        return loss_of(self.make(*self.evaluate(checkpoint)))

    def evaluate(self, checkpoint):
        return ["eval", checkpoint, "--text", self.text, "--max-batches", "1", "--json"]

    def evaluate_tokens(self, checkpoint):
        """For models that came without a tokenizer."""
        return ["eval", checkpoint, "--tokens", self.tokens, "--max-batches", "1", "--json"]

    def _make_models(self):
        self.hf, self.tokenizer = self.path("hf"), self.path("tokenizer.json")
        self.make("convert", self.run, self.hf)
        self.make("tokenize", self.text, "--train", self.tokenizer, "--vocab-size", 300)
        self.tokens = self.path("tokens")
        self.make("tokenize", self.text, "--tokenizer", "byte", "--output", self.tokens)
        self.make("convert", self.hf, self.path("converted"))
        self.loss_converted = loss_of(self.make(*self.evaluate_tokens(self.path("converted"))))

    def resume(self, run, *options, steps=LAST):
        return train(self.text, run, steps, f"--run.checkpoint_interval={FIRST}", *options)


def loss_of(finished):
    match = re.search(r'"loss": ([-+.\w]+)', finished.out)
    return match.group(1) if match else None


SMALL = Limits(memory_kib=4 * 2**20, cpu_seconds=60)
