"""Every key of the configuration with absurd values: refused quickly and in words, or trained with."""
import json
import shutil
import subprocess

from attack import absurd
from attack.harness import Case
from attack.stock import train

SHORT = {"model.num_layers", "model.hidden_size", "moe.num_experts", "moe.top_k", "data.sequence_length",
         "train.micro_batch", "optim.learning_rate", "run.seed", "model.init_deviation", "parallel.tp"}
VALUES = {"int": (*absurd.INTEGERS, *absurd.BEYOND, *absurd.NO_NUMBERS, *absurd.NOT_FINITE),
          "float": (*absurd.NUMBERS, *absurd.NO_NUMBERS, *absurd.NOT_FINITE, "9" * 300), "bool": absurd.FLAGS,
          "str": absurd.WORDS, "list": absurd.LISTS}


def cases(attack):
    return [Case("configuration", key, lambda box, k=key, t=kind: try_key(box, k, t), short=key in SHORT, seconds=900)
            for key, kind in keys(attack).items()]


def keys(attack):
    """Each key with the type of its default."""
    told = subprocess.run([attack.binary, "train", "--print-config", "--json"], capture_output=True, text=True,
                          check=True).stdout
    return {key: type(entry["value"]).__name__ for key, entry in json.loads(told).items()}


def try_key(box, key, kind):
    absurd.try_values(VALUES[kind], lambda i, value: try_value(box, key, value, box.path(f"run-{i}"),
                                                               kind in ("int", "float")))


def try_value(box, key, value, folder, is_number):
    arguments = [word for word in train(box.attack.stock.text, folder, 2) if not word.startswith(f"--{key}=")]
    child = box.start(*arguments, f"--{key}={value}", limits=absurd.QUICK)
    refuse = is_number and absurd.is_no_number(value, unsigned=key == "run.seed")
    try:
        absurd.expect_quick_end(child, value, must_refuse=refuse)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
