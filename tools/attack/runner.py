"""Runs cases beside each other, prints what fails as it fails, and cleans up."""
import concurrent.futures
import glob
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid

from attack.harness import Box, Fault, Skip
from attack.stock import Stock

MARK = "TESSERA_ATTACK"
LINE_LENGTH = 3_000  # of what is told of a failed case
KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH", "USER", "TERM")


class Attack:
    """What all cases share: the program, the seed, the folder, and finished runs made when first asked for."""

    def __init__(self, binary, seed, keep):
        self.binary, self.seed, self.keep = binary, seed, keep
        self.root = tempfile.mkdtemp(prefix="tessera-attack-")
        os.chmod(self.root, 0o755)  # other users' processes attack too
        self.mark = uuid.uuid4().hex
        self.environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        self.environment |= {MARK: self.mark, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
                             "CUDA_VISIBLE_DEVICES": "", "TMPDIR": self.root}
        self.counts = {}   # family: [passed, failed, skipped]
        self.reasons = {}  # reason of a skip: how many
        self.seconds = {}  # family: sum over its cases
        self.stopping = False
        self._numbers = itertools.count(1)
        self._stock, self._lock = None, threading.Lock()
        self._results = threading.Lock()

    def __enter__(self):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        # What is started must not inherit that a background job or nohup ignores these.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, lambda *_: None)
        return self

    def __exit__(self, *_):
        end_marked(self.mark)
        if not (self.keep and os.listdir(self.root)):
            shutil.rmtree(self.root, ignore_errors=True)

    @property
    def stock(self):
        with self._lock:
            if self._stock is None:
                self._stock = Stock(self, os.path.join(self.root, "stock"))
            return self._stock

    def run_all(self, cases, jobs, limit):
        """Runs the cases; 0 where all passed."""
        print(f"{len(cases)} attacks on {self.binary}, {jobs} at a time, seed {self.seed}", flush=True)
        started = time.monotonic()
        try:
            self.stock  # what cannot do this cannot be attacked  # noqa: B018
        except Fault as fault:
            print(f"FAILED stock: {fault}\n  {fault.command}")
            return 1
        end = started + limit
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            try:
                list(pool.map(lambda case: self._run_one(case, end), longest_first(cases)))
            except BaseException:
                self.stopping = True
                pool.shutdown(wait=False, cancel_futures=True)
                end_marked(self.mark)
                raise
        self._print_table(time.monotonic() - started)
        return 0 if all(failed == 0 for _, failed, _ in self.counts.values()) else 1

    def _run_one(self, case, end):
        if time.monotonic() > end:
            self._count(case, 2, "the time for the whole was over")
            return
        started = time.monotonic()
        # No word of the case is in the folder's name, which messages may repeat.
        box = Box(self, case, os.path.join(self.root, str(next(self._numbers))))
        outcome = self._judge(case, box)
        box.close()
        if self.keep and outcome == 1:
            print(f"  {case.title} lies in {box.folder}", flush=True)
        else:
            remove(box.folder)
        with self._results:
            self.seconds[case.family] = self.seconds.get(case.family, 0) + time.monotonic() - started

    def _judge(self, case, box):
        """Runs the case and counts how it ended: 0 passed, 1 failed, 2 skipped."""
        try:
            case.run(box)
        except Skip as skip:
            return self._count(case, 2, str(skip), box)
        except Fault as fault:
            return self._count(case, 1, f"{fault}\n  {fault.command}", box)
        except Exception:
            return self._count(case, 1, "the attack itself failed\n" + traceback.format_exc(), box)
        return self._count(case, 0, "", box)

    def _count(self, case, outcome, text, box=None):
        with self._results:
            counts = self.counts.setdefault(case.family, [0, 0, 0])
            counts[outcome] += 1
            counts[0] += box.passed if box else 0
            if outcome == 1:
                print(f"FAILED {case.title}: {text[:LINE_LENGTH]}", flush=True)
            if outcome == 2:
                self.reasons[text] = self.reasons.get(text, 0) + 1
        return outcome

    def _print_table(self, seconds):
        print(f"\n{'family':<20} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
        for family, (passed, failed, skipped) in sorted(self.counts.items()):
            print(f"{family:<20} {passed:>7} {failed:>7} {skipped:>8} {self.seconds.get(family, 0):>8.0f}")
        for reason, count in self.reasons.items():
            print(f"skipped {count}: {reason}")
        passed, failed, skipped = (sum(column) for column in zip(*self.counts.values())) if self.counts else (0, 0, 0)
        print(f"{passed} passed, {failed} failed, {skipped} skipped; seed {self.seed}, {seconds:.0f} s", flush=True)


def longest_first(cases):
    return sorted(cases, key=lambda case: -case.seconds)


def remove(folder):
    """Removes a folder whose permissions may have been attacked."""
    for path, names, _ in os.walk(folder):
        for name in names:
            if not os.path.islink(os.path.join(path, name)):
                os.chmod(os.path.join(path, name), 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def marked(mark):
    """Process ids whose environment holds the mark."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                if needle in file.read().split(b"\0"):
                    found.append(int(path.split("/")[2]))
        except OSError:
            continue
    return found


def end_marked(mark):
    """Ends what was started, also by what was started (mpirun's ranks have groups of their own)."""
    for _ in range(50):
        found = [pid for pid in marked(mark) if pid != os.getpid()]
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
