"""Damaged checkpoints: refused, or used with the right result, and never without a word where the newest is left out."""
import os
import re

from attack import sealing
from attack.damage import DAMAGES
from attack.harness import Case, expect
from attack.hostile_json import TEXTS, edits_of_manifest, headers
from attack.stock import LAST, SECOND, SMALL, checkpoints, loss_of, require_digest

FILES = ("COMPLETE", "manifest.json", "model-00000.safetensors", "optimizer-00000.safetensors", "latest")
SHORT = {("flip", "model-00000.safetensors"), ("truncate", "optimizer-00000.safetensors"), ("delete", "COMPLETE"),
         ("garbage", "manifest.json"), ("empty", "latest")}
RANDOM_FLIPS = 24
SCALES = {"3": 3, "1000.5": 1000.5, "0": 0, "minus-4": -4, "2^65": 2.0**65, "text": "65536", "none": None}


def cases(_attack):
    found = [Case("checkpoint", f"{damage}-{name}", lambda box, d=damage, n=name: damage_one(box, d, n),
                  short=(damage, name) in SHORT) for damage in DAMAGES for name in FILES]
    found += [Case("checkpoint", f"flip-any-{i}", flip_any, short=i < 3) for i in range(RANDOM_FLIPS)]
    found += [Case("checkpoint", f"both-{damage}", lambda box, d=damage: damage_both(box, d), short=damage == "flip")
              for damage in ("flip", "truncate", "delete")]
    found += [Case("manifest", name, lambda box, edit=edit, name=name: forge_manifest(box, edit, name),
                   short=name == "step-2^63-1")
              for name, edit in edits_of_manifest()]
    found += [Case("manifest", f"text-{name}", lambda box, t=text: forge_text(box, t), short=name == "deep")
              for name, text in TEXTS.items()]
    found += [Case("manifest", f"loss-scale-{name}", lambda box, s=scale: forge_loss_scale(box, s), short=name == "3")
              for name, scale in SCALES.items()]
    found += [Case("safetensors", name, lambda box, make=make: forge_header(box, make), short=name == "length-2^63-1")
              for name, make in headers()]
    return found


def path_of(run, name):
    folder = os.path.join(run, "checkpoints")
    return os.path.join(folder, name) if name == "latest" else os.path.join(sealing.newest(run), name)


def damage_one(box, damage, name):
    run = box.copy(box.attack.stock.run, "run")
    path = path_of(run, name)
    other = path.replace(f"{SECOND:08d}", f"{SECOND - 5:08d}")
    DAMAGES[damage](path, other, box.random)
    judge(box, run)


def flip_any(box):
    """A bit anywhere in the newest checkpoint, where there are more bytes more often."""
    run = box.copy(box.attack.stock.run, "run")
    folder = sealing.newest(run)
    names = sorted(os.listdir(folder))
    sizes = [os.path.getsize(os.path.join(folder, name)) for name in names]
    DAMAGES["flip"](os.path.join(folder, box.random.choices(names, sizes)[0]), None, box.random)
    judge(box, run)


def damage_both(box, damage):
    """No checkpoint is left that could be used: nothing is trained anew over them."""
    run = box.copy(box.attack.stock.run, "run")
    for folder in checkpoints(run):
        DAMAGES[damage](os.path.join(folder, "model-00000.safetensors"), None, box.random)
    expect(box.run(*box.attack.stock.resume(run), limits=SMALL), codes=(2,))
    expect(box.run(*box.attack.stock.evaluate(run), limits=SMALL), codes=(2,))


def forge_manifest(box, edit, name):
    run = box.copy(box.attack.stock.run, "run")
    manifest = sealing.read_manifest(sealing.newest(run))
    edit(manifest)
    sealing.write_manifest(sealing.newest(run), manifest)
    if name.startswith("step-"):  # it contradicts the folder's name
        expect(box.run(*box.attack.stock.evaluate(sealing.newest(run)), limits=SMALL), codes=(2,))
    judge(box, run)


def forge_loss_scale(box, scale):
    """A scale that no run can have had is refused, whatever the precision of what goes on."""
    run = box.copy(box.attack.stock.run, "run")
    newest = sealing.newest(run)
    manifest = sealing.read_manifest(newest)
    manifest["state"]["loss_scale"] = {"scale": scale, "good_steps": 1, "tolerance": 1}
    sealing.write_manifest(newest, manifest)
    expect(box.run(*box.attack.stock.resume(run), limits=SMALL), codes=(2,), says=["power of two"])


def forge_text(box, text):
    run = box.copy(box.attack.stock.run, "run")
    sealing.write_manifest(sealing.newest(run), text)
    judge(box, run)


def forge_header(box, make):
    run = box.copy(box.attack.stock.run, "run")
    path = sealing.model_file(sealing.newest(run))
    sealing.write(path, make(*sealing.split_header(sealing.read(path))))
    sealing.reseal(sealing.newest(run))
    judge(box, run)


def judge(box, run):
    """Every command refuses the run's newest checkpoint, takes an older one and says so, or gives the right result."""
    stock = box.attack.stock
    judge_evaluation(stock, box.run(*stock.evaluate(run), limits=SMALL), may_be_older=True)
    judge_evaluation(stock, box.run(*stock.evaluate(sealing.newest(run)), limits=SMALL), may_be_older=False)
    expect(box.run("generate", run, "--max-tokens", "2", limits=SMALL), codes=(0, 2))
    expect(box.run("inspect", "--checkpoint", run, limits=SMALL), codes=(0, 2))
    resumed = expect(box.run(*stock.resume(run), limits=SMALL), codes=(0, 2))
    if resumed.code == 0:
        require_note(resumed, re.search(rf"continuing after step {SECOND - 5} ", resumed.out))
        require_digest(resumed, run, LAST, stock.expected)


def judge_evaluation(stock, finished, may_be_older):
    expect(finished, codes=(0, 2))
    if finished.code != 0 or loss_of(finished) == stock.loss_newest:
        return
    if not may_be_older or loss_of(finished) != stock.loss_older:
        raise finished.fault("the undamaged checkpoint's loss", found=f"loss {loss_of(finished)}")
    require_note(finished, True)


def require_note(finished, older):
    if older and not re.search("step-|newest|checkpoint", finished.err):
        raise finished.fault("a note on standard error", found="an older checkpoint taken without a word")
