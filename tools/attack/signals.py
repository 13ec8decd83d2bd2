"""Signals that ask a run to end: it saves, and the same command goes on."""
import signal
import time

from attack.harness import Case, expect, need_program
from attack.kills import ENDLESS, end_unbroken
from attack.rank_kills import mpirun, tcp
from attack.stock import checkpoints, last_step, steps_of, train

ENDING = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
HARMLESS = (signal.SIGPIPE, signal.SIGWINCH, signal.SIGCHLD, signal.SIGCONT, signal.SIGURG)


def cases(_attack):
    found = [Case("signals", f"{number.name}-{i}", lambda box, n=number, i=i: save_and_end(box, n, 1 + 2 * (i == 2)),
                  short=i == 0) for number in ENDING for i in range(3)]
    found += [Case("signals", f"{number.name}-starting-{i}", lambda box, n=number: end_start(box, n))
              for number in ENDING for i in range(3)]
    found += [Case("signals", f"{number.name}-harmless", lambda box, n=number: go_on(box, n),
                   short=number == signal.SIGPIPE) for number in HARMLESS]
    found.append(Case("signals", "nohup", lambda box: ignored(box, signal.SIGHUP), short=True))
    found += [Case("signals", f"{start.__name__}-{number.name}", lambda box, s=start, n=number: end_ranks(box, s, n))
              for start in (mpirun, tcp) for number in ENDING]
    return found


def running(box, **options):
    child = box.start(*train(box.attack.stock.text, box.path("run"), ENDLESS, "--run.checkpoint_interval=0"),
                      **options)
    if not child.wait_for("  2/"):
        raise child.finish(0.1).fault("a training that runs")
    return child


def save_and_end(box, number, times):
    """One signal, or several in a row, save once and end with exit code 0."""
    child = running(box)
    for _ in range(times):
        child.send(number)
        time.sleep(0.001)
    finished = child.finish()
    if times == 1:
        expect(finished, codes=(0,))
    if times == 1 and not checkpoints(box.path("run")):
        raise finished.fault("a checkpoint", found="none")
    end_unbroken(box, box.path("run"))


def end_start(box, number):
    """A signal before the first step: an end by itself or by the signal, and then the run can start."""
    child = box.start(*train(box.attack.stock.text, box.path("run"), ENDLESS))
    time.sleep(box.random.uniform(0, 0.1))
    child.send(number)
    finished = child.finish()
    if finished.code != -number:
        expect(finished, codes=(0, 1, 2))
    end_unbroken(box, box.path("run"))


def go_on(box, number):
    child = running(box)
    child.send(number)
    if not child.wait_for("saved", seconds=0.5) and not child.running():
        raise child.finish(0.1).fault("a training that goes on")
    before = child.out().count("\n")
    if not child.wait_for("\n", count=before + 3):
        raise child.finish(0.1).fault("a training that goes on")
    child.send(signal.SIGTERM)
    expect(child.finish(), codes=(0,))


def ignored(box, number):
    """What was started to ignore a signal, as nohup does, is not ended by it."""
    steps = 40
    arguments = train(box.attack.stock.text, box.path("run"), steps)
    child = box.start(*arguments, prefix=["bash", "-c", f'trap "" {number.name[3:]}; exec "$@"', "bash"])
    child.wait_for("  2/")
    child.send(number)
    finished = expect(child.finish(), codes=(0,))
    if steps_of(box.path("run"))[-1] != steps:
        raise finished.fault(f"a training that goes on to step {steps}", found=f"{finished.ended()} before that")


def end_ranks(box, start, number):
    """Sent to what started the ranks, or to all of them."""
    need_program("mpirun")
    ranks = start(box, train(box.attack.stock.text, box.path("run"), ENDLESS, "--run.checkpoint_interval=0"))
    if not ranks.first.wait_for("  2/"):
        raise ranks.first.finish(0.1).fault("a training that runs")
    ranks.strike("launcher" if ranks.launched else "all", number, 0)
    for finished in ranks.finish():
        expect(finished, codes=(0,))
    if last_step(box.path("run")) == 0:
        raise finished.fault("a checkpoint", found="none")
