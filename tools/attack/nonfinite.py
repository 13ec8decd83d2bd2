"""NaN and infinite weights, and settings that make them: errors or findings, never a result without a word."""
import math
import os

from attack import sealing
from attack.harness import Case, expect
from attack.stock import QUIET, SMALL, train

WEIGHTS = {"nan": math.nan, "inf": math.inf, "minus-inf": -math.inf}
NAMES = ("embedding.weight", "layers.0.moe.router.weight", "layers.1.moe.experts.down.weight", "final_norm.weight",
         "layers.0.attn.q.weight")
WORDS = "nan|inf|finite"
SETTINGS = [("model.init_deviation", "1e30"), ("model.init_deviation", "1e38"), ("model.init_deviation", "1e300"),
            ("model.init_deviation", "1e19"), ("model.init_deviation", "1e-45"), ("optim.learning_rate", "1e30"),
            ("optim.learning_rate", "1e38"), ("optim.learning_rate", "1e300"), ("optim.weight_decay", "1e30"),
            ("optim.eps", "1e-300"), ("optim.eps", "1e30"), ("moe.z_loss_coefficient", "1e38"),
            ("moe.balance_coefficient", "1e300"), ("moe.score_scale", "1e38"), ("rope.base", "1e308"),
            ("model.norm_eps", "1e-45"), ("model.norm_eps", "1e38"), ("train.max_grad_norm", "1e-300")]


def cases(_attack):
    found = [Case("nonfinite", f"{use.__name__}-{kind}-{name}", lambda box, u=use, k=kind, n=name: u(box, k, n),
                  short=kind == "nan" and name == NAMES[0])
             for use in (evaluate, generate, export, resume, start_from) for kind in WEIGHTS for name in NAMES]
    found += [Case("nonfinite", f"import-{kind}", lambda box, k=kind: convert_model(box, k), short=kind == "nan")
              for kind in WEIGHTS]
    found += [Case("nonfinite", f"upcycle-{kind}", lambda box, k=kind: upcycle(box, k)) for kind in WEIGHTS]
    found += [Case("nonfinite", f"{key}-{value}", lambda box, k=key, v=value: extreme(box, k, v),
                   short=(key, value) == SETTINGS[0]) for key, value in SETTINGS]
    return found


def spoil(box, kind, name, source=None):
    """A run whose newest checkpoint has one such weight, with hashes that fit."""
    run = box.copy(source or box.attack.stock.run, "run")
    checkpoint = sealing.newest(run)
    path = sealing.model_file(checkpoint)
    # The table's row of a space, which every text reads; other weights are all read.
    at = 32 * 16 if name == "embedding.weight" else 0
    sealing.set_values(path, name, [WEIGHTS[kind]] * (16 if at else 1), at)
    sealing.reseal(checkpoint)
    return run


def evaluate(box, kind, name):
    run = spoil(box, kind, name)
    expect(box.run(*box.attack.stock.evaluate(run), limits=SMALL), codes=(1, 2), says=[WORDS])


def generate(box, kind, name):
    run = spoil(box, kind, name)
    expect(box.run("generate", run, "--prompt", "a b c", "--max-tokens", 3, limits=SMALL), codes=(1, 2), says=[WORDS])


def export(box, kind, name):
    run = spoil(box, kind, name)
    finished = expect(box.run("convert", run, box.path("hf"), limits=SMALL), codes=(1, 2), says=[WORDS])
    if os.path.exists(box.path("hf")):
        raise finished.fault("no folder where a conversion failed", found="a folder")


def resume(box, kind, name):
    run = spoil(box, kind, name)
    expect(box.run(*box.attack.stock.resume(run), limits=SMALL), codes=(1, 2), says=[WORDS])


def start_from(box, kind, name):
    run = spoil(box, kind, name)
    text = box.attack.stock.text
    expect(box.run("train", f"--data.text={text}", f"--run.init_from={run}", f"--run.folder={box.path('new')}",
                   "--train.steps=2", *QUIET, limits=SMALL), codes=(1, 2), says=[WORDS])


def convert_model(box, kind):
    folder = box.copy(box.attack.stock.hf, "hf")
    sealing.set_values(os.path.join(folder, "model.safetensors"), "model.embed_tokens.weight", [WEIGHTS[kind]])
    expect(box.run("convert", folder, box.path("converted"), limits=SMALL), codes=(1, 2), says=[WORDS])


def upcycle(box, kind):
    run = spoil(box, kind, "final_norm.weight", box.attack.stock.dense)
    expect(box.run("upcycle", run, box.path("up"), "--experts", 2, limits=SMALL), codes=(1, 2), says=[WORDS])


def extreme(box, key, value):
    """A refusal, an end that says why, or a training; gradients of exactly 0 are said to be wrong."""
    arguments = train(box.attack.stock.text, box.path("run"), 4, f"--{key}={value}")
    finished = expect(box.run(*arguments, limits=SMALL), codes=(0, 1, 2))
    if finished.code != 0:
        return
    rows = [line.split() for line in finished.out.splitlines() if "/4 " in line]
    losses, norms = [float(row[1]) for row in rows], [float(row[3]) for row in rows]
    if not all(map(math.isfinite, losses + norms)):
        raise finished.fault("an error where loss or gradient is not finite", found=f"losses {losses}, norms {norms}")
    if 0.0 in norms and "gradient" not in finished.err + finished.out.split("step  ")[0]:
        raise finished.fault("a finding that the gradient norm is exactly 0", found=f"norms {norms} without a word")
