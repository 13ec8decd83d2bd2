"""Four ranks, by mpirun or with torchrun's variables, of which one is killed or stopped, or all, or what started them:
the others end and say which rank they miss, nothing stays behind, and the run goes on to the weights of an unbroken
one."""
import os
import re
import signal
import time

from attack.harness import Case, Fault, expect, free_port, need_program
from attack.kills import ENDLESS, require_continued
from attack.runner import marked
from attack.stock import NUM_RANKS, SPREAD, final_digest, last_step, require_digest, steps_of, train

TIMEOUT = 60  # comm_timeout, which only a stopped rank should use up
VICTIMS = ("one", "one", "all", "launcher")


def cases(_attack):
    whole = [Case("rank-kills", f"{start.__name__}-{i}", lambda box, start=start: kill_ranks(box, start, 10),
                  seconds=600) for start in (mpirun, tcp) for i in range(4)]
    stops = [Case("rank-kills", f"{start.__name__}-stopped-{i}", lambda box, start=start: stop_rank(box, start),
                  seconds=300) for start in (mpirun, tcp) for i in range(4)]
    short = [Case("rank-kills", f"{start.__name__}-short", lambda box, start=start: kill_ranks(box, start, 4),
                  short=True, seconds=400) for start in (mpirun, tcp)]
    stopped = [Case("rank-kills", "tcp-stopped-short", lambda box: stop_rank(box, tcp), short=True, seconds=200)]
    return whole + stops + short + stopped


class Ranks:
    """A run on four ranks: `first` prints, `pids` are those of the ranks, by rank."""

    def __init__(self, children, launched):
        self.children, self.launched, self.first = children, launched, children[0]

    def pids(self):
        if not self.launched:
            return {rank: child.process.pid for rank, child in enumerate(self.children)}
        return find_launched(self.first)

    def strike(self, who, number, victim):
        """Sends the signal to one rank, to all, or to what started them."""
        if who == "launcher":
            return self.first.send(number)
        for rank, pid in self.pids().items():
            if who == "all" or rank == victim:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
        return None

    def finish(self, except_rank=None):
        return [child.finish(120) for rank, child in enumerate(self.children) if self.launched or rank != except_rank]


def find_launched(child):
    """Ranks that mpirun started for this run, by the folder in which they run."""
    ranks = {}
    for pid in marked(child.box.attack.mark):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                found = re.search(rb"\0OMPI_COMM_WORLD_RANK=(\d+)\0", file.read())
            if found and os.readlink(f"/proc/{pid}/cwd") == child.box.folder:
                ranks[int(found.group(1))] = pid
        except OSError:
            continue
    return ranks


def mpirun(box, arguments):
    need_program("mpirun")
    return Ranks([box.start(*arguments, "--ranks", NUM_RANKS, *SPREAD)], launched=True)


def tcp(box, arguments):
    port = free_port()
    return Ranks([box.start(*arguments, *SPREAD, environment=torch_environment(rank, NUM_RANKS, port))
                  for rank in range(NUM_RANKS)], launched=False)


def torch_environment(rank, num_ranks, port):
    """What torchrun sets for a rank."""
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def kill_ranks(box, start, num_kills):
    """Each kill that hits running ranks counts as a case."""
    text, run = box.attack.stock.text, box.path("run")
    options = ["--run.checkpoint_interval=2", f"--run.comm_timeout={TIMEOUT}"]
    kinds = [kind for kind in VICTIMS if kind != "launcher" or start is mpirun]
    for i in range(num_kills):
        saved = last_step(run)
        ranks = start(box, train(text, run, ENDLESS, *options))
        await_saves(box, ranks, saved)
        kill_some(box, ranks, kinds[i % len(kinds)])
        box.passed += 1
    end_like_unbroken(box, run, start, *options)


def await_saves(box, ranks, saved):
    """Waits until the run has saved, and some moments more."""
    if not ranks.first.wait_for("\nsaved ", count=box.random.randrange(1, 3)):
        raise ranks.first.finish(0.1).fault("checkpoints", found="no checkpoint, or an early end")
    require_continued(ranks.first, saved)
    time.sleep(box.random.uniform(0, 0.15))


def kill_some(box, ranks, who):
    victim = box.random.randrange(NUM_RANKS)
    if len(ranks.pids()) != NUM_RANKS:
        raise ranks.first.finish(0.1).fault(f"{NUM_RANKS} ranks", found=f"ranks {sorted(ranks.pids())}")
    ranks.strike(who, signal.SIGKILL, victim)
    finished = ranks.finish(except_rank=victim)
    if who == "one":
        require_named(finished, ranks, victim)
    require_nothing_left(box, finished[0])


def require_named(finished, ranks, victim):
    """Every survivor has ended with a message that names the victim."""
    told = "".join(one.err for one in finished)
    for one in finished:
        if not ranks.launched:
            expect(one, codes=(2,))
        elif one.code is None or one.code <= 0:  # mpirun's may be that of the killed rank
            raise one.fault("an exit code that says failure")
    for rank in range(NUM_RANKS):
        if rank != victim and not re.search(rf"tessera: rank {rank} waited .*missing rank [0-9 ]*", told):
            raise finished[0].fault(f"a message of rank {rank}, which waited for rank {victim}",
                                    found="no such message")
    if not re.search(rf"missing ranks? [0-9 ]*\b{victim}\b", told):
        raise finished[0].fault(f"a message that names rank {victim}", found="no such message")


def require_nothing_left(box, finished, seconds=60):
    """Launched ranks end with their launcher, within some seconds on a busy machine."""
    end = time.monotonic() + seconds
    while left := [pid for pid in marked(box.attack.mark) if runs_in(pid, box.folder)]:
        if time.monotonic() > end:
            raise finished.fault("nothing left behind", found=f"{len(left)} processes still run")
        time.sleep(0.05)


def runs_in(pid, folder):
    try:
        return os.readlink(f"/proc/{pid}/cwd") == folder
    except OSError:
        return False


def end_like_unbroken(box, run, start, *options):
    text, last = box.attack.stock.text, last_step(run) + 2
    ended = [expect(one, codes=(0,)) for one in start(box, train(text, run, last, *options)).finish()]
    whole = start(box, train(text, box.path("whole"), last, "--run.checkpoint_interval=0"))
    for one in whole.finish():
        expect(one, codes=(0,))
    require_digest(ended[0], run, last, final_digest(box.path("whole")))
    if steps_of(run) != list(range(1, last + 1)):
        raise Fault(ended[0].command, "steps missing or twice in metrics.jsonl", "every step once")


def stop_rank(box, start):
    """A rank that stands still is named by the others within comm_timeout and some seconds; then the run goes on."""
    text, run = box.attack.stock.text, box.path("run")
    options = ["--run.checkpoint_interval=2"]
    victim = box.random.randrange(NUM_RANKS)
    ranks = start(box, train(text, run, ENDLESS, *options, "--run.comm_timeout=4"))
    await_saves(box, ranks, 0)
    stopped = ranks.pids()
    ranks.strike("one", signal.SIGSTOP, victim)
    finished = ranks.finish(except_rank=victim)
    ranks.children[-1 if ranks.launched else victim].end()
    require_named(finished, ranks, victim)
    if not ranks.launched or stopped[victim] in marked(box.attack.mark):
        end_process(stopped[victim])
    end_like_unbroken(box, run, start, *options)


def end_process(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
