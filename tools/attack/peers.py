"""Four ranks with copies of their states in memory (checkpoint.peer_copy), of which one is killed, or all, and its folder in memory
removed as if its machine were lost: the run goes on from a state that is newer than the newest checkpoint, to the weights of an unbroken
run, and leaves nothing in memory."""
import os
import re
import shutil
import signal
import subprocess
import time
import uuid

from attack.harness import Case, Skip, expect
from attack.kills import ENDLESS
from attack.rank_kills import mpirun, require_nothing_left, tcp
from attack.stock import NUM_RANKS, final_digest, last_step, require_digest, steps_of, train

MEMORY = "/dev/shm"
INTERVAL = 2


def cases(_attack):
    whole = [Case("peers", f"{start.__name__}-{i}", lambda box, start=start: kill_series(box, start, 6), seconds=600)
             for start in (mpirun, tcp) for i in range(2)]
    short = [Case("peers", "tcp-short", lambda box: kill_series(box, tcp, 3), short=True, seconds=400),
             Case("peers", "disk-short", not_in_memory, short=True, seconds=200)]
    return whole + short


class MemoryFolder:
    """A folder of the case's own in memory."""

    def __enter__(self):
        if not os.access(MEMORY, os.W_OK):
            raise Skip(f"no {MEMORY}")
        self.path = os.path.join(MEMORY, f"tessera-attack-{uuid.uuid4().hex}")
        os.mkdir(self.path)
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)

    def options(self):
        return ["--checkpoint.peer_copy=true", f"--checkpoint.peer_interval={INTERVAL}",
                f"--checkpoint.peer_folder={self.path}"]

    def lose(self, rank):
        for run in os.listdir(self.path):
            shutil.rmtree(os.path.join(self.path, run, f"rank-{rank:05d}"))


def kill_series(box, start, num_kills):
    """Each kill that hits running ranks counts as a case."""
    text, run = box.attack.stock.text, box.path("run")
    reached = 0
    with MemoryFolder() as memory:
        options = ["--run.checkpoint_interval=100000", *memory.options()]
        for i in range(num_kills):
            ranks = start(box, train(text, run, ENDLESS, *options))
            await_copies(box, ranks, reached)
            reached = kill(box, ranks, memory, all_ranks=i % 2 == 1)
            box.passed += 1
        last = reached + 3
        ended = [expect(one, codes=(0,)) for one in start(box, train(text, run, last, *options)).finish()]
        require_resumed(ended[0], ended[0].out, reached)
        if os.listdir(memory.path):
            raise ended[0].fault("nothing left in memory", found=f"{os.listdir(memory.path)}")
    for one in start(box, train(text, box.path("whole"), last, "--run.checkpoint_interval=0")).finish():
        expect(one, codes=(0,))
    require_digest(ended[0], run, last, final_digest(box.path("whole")))
    if steps_of(run) != list(range(1, last + 1)):
        raise ended[0].fault("every step once in metrics.jsonl", found="steps that are missing or there twice")


def await_copies(box, ranks, reached):
    if not ranks.first.wait_for(" is in two ranks' memory"):
        raise ranks.first.finish(0.1).fault("copies in memory", found="no copies, or an early end")
    if reached > 0:
        require_resumed(ranks.first, ranks.first.out(), reached)
    time.sleep(box.random.uniform(0, 0.3))


def require_resumed(who, out, reached):
    """From the ranks' memory, at most INTERVAL steps and an unfinished copy before the last step that was seen."""
    found = re.search(r"continuing after step (\d+) of", out)
    step = int(found.group(1)) if found else 0
    if step < reached or "comes from the ranks' memory" not in out:
        fault = who.fault if hasattr(who, "fault") else who.finish(0.1).fault
        raise fault(f"a run that goes on from memory, after step {reached} or later", found=f"step {step}")


def kill(box, ranks, memory, all_ranks):
    """Returns a step whose copies were complete when the kill came."""
    victim = box.random.randrange(NUM_RANKS)
    seen = [int(step) for step in re.findall(r"^ *(\d+)/\d+ ", ranks.first.out(), re.MULTILINE)]
    ranks.strike("all" if all_ranks else "one", signal.SIGKILL, victim)
    finished = ranks.finish(except_rank=victim)
    require_nothing_left(box, finished[0])
    memory.lose(victim)
    # The line of a step is printed before its copies are made, and those of the step before are complete by then.
    return max(seen[-1] - 1, 0) // INTERVAL * INTERVAL


def not_in_memory(box):
    """A folder on a disk is refused, and nothing begins."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", box.folder], capture_output=True, text=True, check=True).stdout
    if kind.strip() == "tmpfs":
        raise Skip("the temporary folder is in memory")
    text, run = box.attack.stock.text, box.path("run")
    ranks = tcp(box, train(text, run, 4, "--checkpoint.peer_copy=true", f"--checkpoint.peer_folder={box.folder}"))
    ended = ranks.finish()
    expect(ended[0], codes=(2,))
    if "is not in memory (tmpfs)" not in "".join(one.err for one in ended):
        raise ended[0].fault("a message that the folder is not in memory")
    if last_step(run) != 0:
        raise ended[0].fault("a run that did not begin", found=f"step {last_step(run)}")
