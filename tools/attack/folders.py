"""Two runs in one folder, folders and files that vanish or change under a run, and logs that do not fit."""
import json
import os
import re
import shutil
import signal
import time

from attack.harness import Case, expect, expect_ranks, free_port, need_program
from attack.kills import ENDLESS, end_unbroken
from attack.limits import as_nobody
from attack.rank_kills import torch_environment
from attack.stock import LAST, SECOND, SMALL, checkpoints, final_digest, last_step, loss_of, require_digest, train

SAVING = "--run.checkpoint_interval=2"


def cases(_attack):
    found = [Case("two-runs", name, lambda box, p=path: second_run(box, p), short=name in ("same", "symlink"))
             for name, path in paths().items()]
    found += [Case("two-runs", name, lambda box, o=options: second_run(box, paths()["same"], o))
              for name, options in (("never", ["--run.resume=never"]), ("other", ["--run.seed=2"]),
                                    ("ranks", ["--ranks", "2"]))]
    found += [Case("two-runs", "first-stands-still", lambda box: second_run(box, paths()["same"], stopped=True), short=True),
              Case("two-runs", "tcp-ranks", second_ranks), Case("two-runs", "at-once", start_at_once, short=True),
              Case("two-runs", "copied-lock", copied_lock, short=True), Case("two-runs", "moved-lock", moved_lock),
              Case("two-runs", "tokenize", lambda box: twice(box, "tokenize"), short=True),
              Case("two-runs", "convert", lambda box: twice(box, "convert"))]
    found += [Case("vanishing", name, lambda box, a=act: vanish(box, a), short=name == "deleted")
              for name, act in VANISHING.items()]
    found.append(Case("vanishing", "checkpoints", lose_checkpoints))
    found += [Case("vanishing", f"harmless-{name}", lambda box, a=act: vanish_harmlessly(box, a))
              for name, act in HARMLESS.items()]
    found += [Case("logs", name, lambda box, c=change: change_log(box, c), short=name in ("ahead", "behind"))
              for name, change in LOGS.items()]
    found += [Case("resuming", function.__name__, function, short=function in (changed_text, fewer_steps))
              for function in (changed_text, changed_text_and_time, replaced_text, missing_text, fewer_steps, same_steps)]
    found += [Case("permissions", function.__name__, function, short=function is read_only_run)
              for function in (read_only_run, read_only_parent, unreadable_checkpoint, read_only_use)]
    return found


def paths():
    """Ways to name the folder `run` in a box."""
    def symlink(box):
        os.symlink(box.path("run"), box.path("link"))
        return box.path("link")

    def parent_link(box):
        os.symlink(box.folder, box.path("parent"))
        return box.path("parent", "run")

    return {"same": lambda box: box.path("run"), "symlink": symlink, "parent-symlink": parent_link,
            "relative": lambda box: "run", "dots": lambda box: "run/../run/.", "slashes": lambda box: f"{box.folder}//run/",
            "proc": lambda box: "/proc/self/cwd/run"}


def start_first(box, *options):
    child = box.start(*train(box.attack.stock.text, box.path("run"), ENDLESS, SAVING, *options))
    if not child.wait_for("\nsaved ", count=2):
        raise child.finish(0.1).fault("a training that saves")
    return child


def require_refused(box, path, options=()):
    refused = box.run(*train(box.attack.stock.text, path, ENDLESS, SAVING, *options), seconds=60)
    expect(refused, codes=(2,), says=["run|folder"])
    if "saved " in refused.out:
        raise refused.fault("a refusal before anything is written", found="a checkpoint")


def second_run(box, path, options=(), stopped=False):
    """The second run is refused, and the first goes on as if nothing had been."""
    if "--ranks" in options:
        need_program("mpirun")
    first = start_first(box)
    if stopped:
        first.send(signal.SIGSTOP)
    require_refused(box, path(box), options)
    first.send(signal.SIGCONT)
    saved = last_step(box.path("run"))
    if not first.wait_for(f"step-{saved + 4:08d}"):
        raise first.finish(0.1).fault("a first run that goes on")
    first.send(signal.SIGTERM)
    expect(first.finish(), codes=(0,))
    end_unbroken(box, box.path("run"), SAVING)


def second_ranks(box):
    """Two ranks in the folder of one that runs."""
    first = start_first(box)
    port = free_port()
    children = [box.start(*train(box.attack.stock.text, box.path("run"), ENDLESS, SAVING, "--run.comm_timeout=10"),
                          environment=torch_environment(rank, 2, port)) for rank in range(2)]
    expect_ranks([child.finish(60) for child in children], codes=(2,))
    first.send(signal.SIGTERM)
    expect(first.finish(), codes=(0,))
    end_unbroken(box, box.path("run"), SAVING)


def start_at_once(box):
    """Of several that start together one trains."""
    children = [box.start(*train(box.attack.stock.text, box.path("run"), 40, SAVING)) for _ in range(4)]
    finished = [expect(child.finish(), codes=(0, 2)) for child in children]
    if not any(one.code == 0 for one in finished):
        raise finished[0].fault("one that trains", found="four that are refused")
    end_unbroken(box, box.path("run"), SAVING)


def copied_lock(box):
    """A folder copied from a run that is dead now: whatever lock is in the copy, nobody holds it."""
    first = start_first(box)
    first.send(signal.SIGSTOP)
    shutil.copytree(box.path("run"), box.path("copy"), symlinks=True)
    first.end()
    shutil.rmtree(box.path("run"))
    os.rename(box.path("copy"), box.path("run"))
    end_unbroken(box, box.path("run"), SAVING)


def moved_lock(box):
    start_first(box).end()
    os.rename(box.path("run"), box.path("moved"))
    os.rename(box.path("moved"), box.path("run"))
    end_unbroken(box, box.path("run"), SAVING)


def twice(box, command):
    """Two of the same command at a time: each does its work or is refused, and the result is whole."""
    stock, target = box.attack.stock, box.path("target")
    arguments = {"tokenize": ["tokenize", stock.text, "--tokenizer", "byte", "-o", target],
                 "convert": ["convert", stock.hf, target]}[command]
    children = [box.start(*arguments) for _ in range(3)]
    finished = [expect(child.finish(), codes=(0, 2)) for child in children]
    if not any(one.code == 0 for one in finished):
        raise finished[0].fault("one that works", found="all refused")
    if command == "convert":
        if loss_of(expect(box.run(*stock.evaluate_tokens(target)), codes=(0,))) != stock.loss_converted:
            raise finished[0].fault("the model of one", found="another model")
        return
    with open(target + ".bin", "rb") as found, open(stock.tokens + ".bin", "rb") as expected:
        if found.read() != expected.read():
            raise finished[0].fault("the tokens of one", found="other tokens")


def delete_run(box):
    for _ in range(20):  # the run may write between
        shutil.rmtree(box.path("run"), ignore_errors=True)
        if not os.path.exists(box.path("run")):
            return


def rename_run(box):
    os.rename(box.path("run"), box.path("elsewhere"))


def replace_run(box):
    rename_run(box)
    os.mkdir(box.path("run"))


def replace_run_by_file(box):
    rename_run(box)
    box.write("run", "not a folder")


VANISHING = {"deleted": delete_run, "renamed": rename_run, "replaced": replace_run, "a-file": replace_run_by_file}
HARMLESS = {"text": lambda box: os.remove(box.path("text.txt")), "latest": lambda box: os.remove(
    box.path("run", "checkpoints", "latest")), "tokens": lambda box: shutil.rmtree(box.path("run", "tokens"))}


def vanish(box, act):
    """The folder is taken away under a run: it stops, or says so and goes on."""
    child = start_first(box)
    act(box)
    end = time.monotonic() + 30
    while child.running() and not child.err() and time.monotonic() < end:
        time.sleep(0.02)
    told = bool(child.err())
    if told:
        child.wait_for("\nno such line\n", seconds=10)  # for it to end by itself
    child.send(signal.SIGTERM)
    finished = expect(child.finish(), codes=(0, 1, 2))
    if not told:
        raise finished.fault("an end, or a note on standard error", found=f"{finished.ended()} without a word")


def lose_checkpoints(box):
    """Without its checkpoints a run may stop, with a message, or go on and save again."""
    child = start_first(box)
    shutil.rmtree(box.path("run", "checkpoints"), ignore_errors=True)
    time.sleep(0.3)
    child.send(signal.SIGTERM)
    finished = expect(child.finish(), codes=(0, 1, 2))
    if finished.code == 0:
        end_unbroken(box, box.path("run"), SAVING)


def vanish_harmlessly(box, act):
    """What a run needs no more may go."""
    text = box.copy(box.attack.stock.text, "text.txt")
    child = box.start(*train(text, box.path("run"), ENDLESS, SAVING))
    child.wait_for("\nsaved ")
    act(box)
    saved = last_step(box.path("run"))
    if not child.wait_for(f"step-{saved + 4:08d}"):
        raise child.finish(0.1).fault("a training that goes on")
    child.send(signal.SIGTERM)
    expect(child.finish(), codes=(0,))


def ahead(lines):
    """As a run that went on without its checkpoints leaves it."""
    record = json.loads(lines[-1])
    return lines + [json.dumps({**record, "type": "step", "step": record.get("step", SECOND) + 50 + i}) for i in range(3)]


def other_steps(lines):
    """As two runs leave it that wrote at the same time."""
    return [json.dumps({**json.loads(line), "step": 100 + i}) for i, line in enumerate(lines)]


LOGS = {"ahead": ahead, "behind": lambda lines: lines[:2], "empty": lambda lines: [], "other-steps": other_steps,
        "twice": lambda lines: lines + lines, "backwards": lambda lines: lines[::-1],
        "gap": lambda lines: lines[:3] + lines[5:], "no-object": lambda lines: lines + ["[]"],
        "huge-step": lambda lines: lines + ['{"type":"step","step":9223372036854775807}'],
        "negative": lambda lines: ['{"type":"step","step":-1}'] + lines, "text-step": lambda lines: [
            '{"type":"step","step":"1"}'] + lines, "nan": lambda lines: lines + ['{"type":"step","step":NaN}'],
        "cut": lambda lines: lines[:-1] + [lines[-1][:20]], "interleaved": lambda lines: [
            line for pair in zip(lines, lines) for line in pair]}


def change_log(box, change):
    """A log that does not fit the checkpoint never blocks a run, and is not lost."""
    run = box.copy(box.attack.stock.run, "run")
    path = os.path.join(run, "metrics.jsonl")
    with open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    with open(path, "w", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in change(lines)))
    resumed = expect(box.run(*box.attack.stock.resume(run), limits=SMALL), codes=(0,))
    require_digest(resumed, run, LAST, box.attack.stock.expected)
    with open(path, encoding="utf-8") as file:
        steps = [record["step"] for record in map(json.loads, file) if record["type"] == "step"]
    if steps[-1:] != [LAST] or steps != sorted(set(steps)):
        raise resumed.fault(f"a log of steps that rise to {LAST}", found=f"steps {steps[:20]}")


def stopped_with_own_text(box):
    """A run of step 10 on a text of its own, and the command that continues it."""
    text = box.copy(box.attack.stock.text, "text.txt")
    save = "--run.checkpoint_interval=5"
    expect(box.run(*train(text, box.path("run"), SECOND, save)), codes=(0,))
    return text, train(text, box.path("run"), LAST, save)


def require_noticed(finished):
    expect(finished, codes=(0, 2))
    if finished.code == 0 and not re.search("chang|differ|other (text|tokens)|not the text", finished.err + finished.out):
        raise finished.fault("a refusal or a note that the text has changed", found="exit code 0 without a word")


def changed_text(box):
    """Other bytes, but the size and the times of before."""
    text, command = stopped_with_own_text(box)
    before = os.stat(text)
    with open(text, "r+b") as file:
        file.seek(before.st_size // 2)
        file.write(b"zyxwvutsrq")
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    require_noticed(box.run(*command))


def changed_text_and_time(box):
    text, command = stopped_with_own_text(box)
    with open(text, "a", encoding="ascii") as file:
        file.write("more\n")
    require_noticed(box.run(*command))


def replaced_text(box):
    text, command = stopped_with_own_text(box)
    os.remove(text)
    os.mkdir(text)
    expect(box.run(*command), codes=(0, 2))


def missing_text(box):
    text, command = stopped_with_own_text(box)
    os.remove(text)
    expect(box.run(*command), codes=(0, 2))


def fewer_steps(box):
    """A run that has gone further than it is told to go."""
    run = box.copy(box.attack.stock.run, "run")
    expect(box.run(*box.attack.stock.resume(run, steps=SECOND - 3)), codes=(2,), says=["step"])


def same_steps(box):
    run = box.copy(box.attack.stock.run, "run")
    before = final_digest(run)
    finished = expect(box.run(*box.attack.stock.resume(run, steps=SECOND)), codes=(0,))
    require_digest(finished, run, SECOND, before)


def set_modes(folder, mode):
    for path, _, names in os.walk(folder):
        for name in names:
            os.chmod(os.path.join(path, name), mode & 0o666)
        os.chmod(path, mode)


def own_run(box):
    """A copy of the finished run for a user without rights, and the start of that user's command lines."""
    prefix = as_nobody(box)
    return prefix, box.copy(box.attack.stock.run, "run")


def read_only_run(box):
    prefix, run = own_run(box)
    set_modes(run, 0o555)
    expect(box.run(*box.attack.stock.resume(run), prefix=prefix), codes=(2,), says=["permi|denied|writ"])


def read_only_parent(box):
    prefix = as_nobody(box)
    os.mkdir(box.path("parent"))
    os.chmod(box.path("parent"), 0o555)
    expect(box.run(*train(box.attack.stock.text, box.path("parent", "run"), 3), prefix=prefix), codes=(2,),
           says=["permi|denied|writ"])


def unreadable_checkpoint(box):
    prefix, run = own_run(box)
    set_modes(run, 0o755)
    os.chmod(checkpoints(run)[-1], 0)
    expect(box.run(*box.attack.stock.evaluate(run), prefix=prefix), codes=(0, 2))
    expect(box.run(*box.attack.stock.resume(run), prefix=prefix), codes=(0, 2))


def read_only_use(box):
    """What only reads a run works where nothing can be written."""
    prefix, run = own_run(box)
    set_modes(run, 0o555)
    expect(box.run(*box.attack.stock.evaluate(run), prefix=prefix), codes=(0,))
    expect(box.run("generate", run, "--max-tokens", 2, prefix=prefix), codes=(0,))
    expect(box.run("inspect", "--checkpoint", run, prefix=prefix), codes=(0,))
