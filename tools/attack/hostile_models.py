"""Hugging Face folders and tokenizers from strangers: refused, or converted to the same model."""
import json
import os

from attack.damage import DAMAGES
from attack.harness import Case, expect
from attack.hostile_json import HUGE, TEXTS, headers
from attack.sealing import read, split_header, write
from attack.stock import SMALL, loss_of

VALUES = (0, -1, 2**31, 2**62, HUGE, 2**64, 1e308, "x", None, [], {}, True)
SHORT_KEYS = {"hidden_size", "vocab_size", "num_hidden_layers"}
KEYS = ("architectures", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
        "model_type", "num_attention_heads", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
        "num_local_experts", "output_router_logits", "rms_norm_eps", "rope_scaling", "rope_theta",
        "router_aux_loss_coef", "sliding_window", "tie_word_embeddings", "torch_dtype", "vocab_size")


def cases(_attack):
    found = [Case("hf-config", key, lambda box, key=key: change_key(box, key), short=key in SHORT_KEYS, seconds=400)
             for key in KEYS]
    found += [Case("hf-config", f"text-{name}", lambda box, t=text: change_text(box, "config.json", t),
                   short=name == "deep") for name, text in TEXTS.items()]
    found += [Case("hf-weights", name, lambda box, make=make: change_header(box, make),
                   short=name in ("offsets-1", "overlapping")) for name, make in headers()]
    found += [Case("hf-weights", damage, lambda box, d=damage: damage_weights(box, d), short=damage == "truncate")
              for damage in DAMAGES]
    found += [Case("hf-index", name, lambda box, t=text: change_text(box, "model.safetensors.index.json", t, True),
                   short=name == "outside") for name, text in indices()]
    found += [Case("tokenizers", f"text-{name}", lambda box, t=text: use_tokenizer(box, "tokenizer.json", t),
                   short=name == "deep") for name, text in TEXTS.items()]
    found += [Case("tokenizers", f"changed-{i}", change_tokenizer, short=i < 2) for i in range(12)]
    found += [Case("tokenizers", f"model-{i}", lambda box, d=data: use_tokenizer(box, "tokenizer.model", d))
              for i, data in enumerate((b"", b"\x0a", b"\x0a\xff\xff\xff\xff\x7f", b"\0" * 1000, b"\x0a\x05\x0a\x01a" * 9))]
    return found


def judge(box, folder):
    """A conversion either says what is wrong or gives the model that the damage left as it was."""
    target = box.path("converted")
    converted = expect(box.run("convert", folder, target, limits=SMALL), codes=(0, 2))
    if converted.code != 0 and os.path.exists(target):
        raise converted.fault("no target where a conversion failed", found="a target")
    return converted


def judge_same(box, folder):
    converted = judge(box, folder)
    if converted.code == 0:
        evaluated = expect(box.run(*box.attack.stock.evaluate_tokens(box.path("converted")), limits=SMALL), codes=(0,))
        if loss_of(evaluated) != box.attack.stock.loss_converted:
            raise evaluated.fault("the undamaged model's loss", found=f"loss {loss_of(evaluated)}")


def change_key(box, key):
    for i, value in enumerate(VALUES):
        folder = box.copy(box.attack.stock.hf, f"hf-{i}")
        path = os.path.join(folder, "config.json")
        config = json.loads(read(path))
        config[key] = value
        write(path, json.dumps(config))
        target = box.path(f"converted-{i}")
        expect(box.run("convert", folder, target, limits=SMALL), codes=(0, 2))


def change_text(box, name, text, without_weights=False):
    folder = box.copy(box.attack.stock.hf, "hf")
    write(os.path.join(folder, name), text)
    if without_weights:
        os.rename(os.path.join(folder, "model.safetensors"), os.path.join(folder, "model-1.safetensors"))
    judge_same(box, folder)


def change_header(box, make):
    folder = box.copy(box.attack.stock.hf, "hf")
    path = os.path.join(folder, "model.safetensors")
    write(path, make(*split_header(read(path))))
    judge_same(box, folder)


def damage_weights(box, damage):
    """There is no hash of these weights, so a damage within a tensor cannot be seen."""
    folder = box.copy(box.attack.stock.hf, "hf")
    DAMAGES[damage](os.path.join(folder, "model.safetensors"), None, box.random)
    judge(box, folder)


def indices():
    found = [(name, text) for name, text in TEXTS.items()]
    for name, file in (("outside", "../../../../etc/passwd"), ("absolute", "/etc/passwd"), ("empty-name", ""),
                       ("missing", "model-2.safetensors"), ("itself", "model.safetensors.index.json"), ("number", 5)):
        found.append((name, json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": file}})))
    return found


def use_tokenizer(box, name, data):
    path = box.write(name, data)
    expect(box.run("tokenize", box.attack.stock.text, "--tokenizer", path, "-o", box.path("out"), limits=SMALL),
           codes=(2,))


def change_tokenizer(box):
    """Bytes of a tokenizer.json changed at random: refused, or another tokenizer."""
    data = bytearray(read(box.attack.stock.tokenizer))
    for _ in range(box.random.randrange(1, 4)):
        at = box.random.randrange(len(data))
        data[at:at + box.random.randrange(3)] = box.random.choice((b"", b"9" * 30, b'"', b"[", box.random.randbytes(3)))
    path = box.write("tokenizer.json", bytes(data))
    expect(box.run("tokenize", box.attack.stock.text, "--tokenizer", path, "-o", box.path("out"), limits=SMALL),
           codes=(0, 2))
