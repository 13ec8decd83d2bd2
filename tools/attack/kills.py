"""One rank killed at random moments: what was saved is continued, and the end has the weights of an unbroken run."""
import filecmp
import os
import random
import signal
import time

from attack.harness import Case, Fault, expect
from attack.stock import final_digest, last_step, require_digest, steps_of, train

ENDLESS = 10**6
TOKENIZED_MIB = 24


def cases(_attack):
    series = [Case("kills", f"train-{i}", lambda box, i=i: kill_training(box, 16, 1 + i % 3), seconds=400)
              for i in range(6)]
    texts = [Case("kills", f"tokenize-{i}", lambda box, i=i: kill_tokenizing(box, 8, 1 + i % 2), seconds=400)
             for i in range(3)]
    starts = [Case("kills", f"train-start-{i}", lambda box: kill_starts(box, 8), seconds=400) for i in range(2)]
    short = [Case("kills", "train-short", lambda box: kill_training(box, 10, 1), short=True, seconds=300),
             Case("kills", "tokenize-short", lambda box: kill_tokenizing(box, 3, 1), short=True, seconds=300),
             Case("kills", "train-start-short", lambda box: kill_starts(box, 3), short=True, seconds=300)]
    return series + texts + starts + short


def kill_training(box, num_kills, interval):
    """A run that saves every few steps is killed and continued; each kill that hits counts as a case."""
    text, run = box.attack.stock.text, box.path("run")
    saving = f"--run.checkpoint_interval={interval}"
    for _ in range(num_kills):
        saved = last_step(run)
        child = box.start(*train(text, run, ENDLESS, saving))
        strike(box, child, saved)
        box.passed += 1
    end_unbroken(box, run, saving)


def strike(box, child, saved):
    """Kills the run in the middle of its steps and saves, having checked that it went on from what was saved."""
    lines = box.random.randrange(1, 4)
    if not child.wait_for("\nsaved ", count=lines):
        raise child.finish(0.1).fault(f"{lines} checkpoints", found="no checkpoint, or an early end")
    require_continued(child, saved)
    time.sleep(box.random.uniform(0, 0.08))
    child.send(signal.SIGKILL)
    killed = child.finish()
    if killed.code != -signal.SIGKILL:
        raise killed.fault("a training that runs until it is killed")


def require_continued(child, saved):
    if saved == 0:
        return
    line = next((line for line in child.out().splitlines() if line.startswith("continuing after step ")), "")
    step = int(line.split()[3]) if line else 0
    if step < saved:
        raise Fault(child.command, f"continued after step {step}", f"step {saved}, which was complete")


def end_unbroken(box, run, *options):
    """Lets the run end, and compares it with one that nothing broke."""
    text, last = box.attack.stock.text, last_step(run) + 3
    ended = expect(box.run(*train(text, run, last, *options)), codes=(0,))
    expect(box.run(*train(text, box.path("whole"), last, "--run.checkpoint_interval=0"), seconds=200), codes=(0,))
    require_digest(ended, run, last, final_digest(box.path("whole")))
    if steps_of(run) != list(range(1, last + 1)):
        raise ended.fault("every step once in metrics.jsonl", found="steps that are missing or there twice")


def kill_starts(box, num_kills):
    """Kills a run anywhere between its start and its first steps, while it reads and tokenizes text too."""
    text, run = make_text(box, 4), box.path("run")
    for _ in range(num_kills):
        child = box.start(*train(text, run, ENDLESS, "--run.checkpoint_interval=1"))
        time.sleep(box.random.uniform(0.005, 0.5))
        box.passed += child.running()
        child.send(signal.SIGKILL)
        child.finish()
    last = last_step(run) + 3
    ended = expect(box.run(*train(text, run, last)), codes=(0,))
    expect(box.run(*train(text, box.path("whole"), last, "--run.checkpoint_interval=0"), seconds=200), codes=(0,))
    require_digest(ended, run, last, final_digest(box.path("whole")))


def make_text(box, mebibytes):
    """A text of lines that differ, fast to write."""
    draw = random.Random(box.random.random())
    block = [" ".join(str(draw.randrange(10**6)) for _ in range(12)) for _ in range(2000)]
    with open(box.path("big.txt"), "w", encoding="ascii") as file:
        while file.tell() < mebibytes * 2**20:
            file.write("\n".join(draw.sample(block, len(block))) + "\n\n")
    return box.path("big.txt")


def kill_tokenizing(box, num_kills, threads):
    """`tokenize` killed at any time goes on and ends with the same bytes."""
    text = make_text(box, TOKENIZED_MIB)
    command = ["tokenize", text, "--tokenizer", box.attack.stock.tokenizer, "--separator", "", "--sync-seconds", "0",
               "--threads", threads, "--output"]
    whole = expect(box.run(*command, box.path("whole")), codes=(0,))
    for _ in range(num_kills):
        child = box.start(*command, box.path("broken"))
        time.sleep(box.random.uniform(0, 0.9) * whole.seconds)
        if not child.running():
            break
        child.send(signal.SIGKILL)
        child.finish()
        box.passed += 1
    ended = expect(box.run(*command, box.path("broken")), codes=(0,))
    for ending in (".bin", ".idx"):
        if not same(box.path("whole" + ending), box.path("broken" + ending)):
            raise ended.fault("the bytes of an unbroken one", found=f"another {ending} file")


def same(one, other):
    return os.path.exists(other) and filecmp.cmp(one, other, shallow=False)
