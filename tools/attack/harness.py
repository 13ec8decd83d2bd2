"""What all families of attacks share: cases, and commands that run under limits in a folder of their own."""
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field

MIB = 2**20
OUTPUT_READ = 400_000     # bytes of a command's output that are looked at
MESSAGE_LENGTH = 6_000    # an error message that is longer helps nobody
USER_ERROR, INTERNAL_ERROR = 2, 1
PATIENCE = 90             # seconds that a command may take on a busy machine where nothing else is said


class Fault(Exception):
    """The program did what it must not."""

    def __init__(self, command, found, expected):
        super().__init__(f"{found}; expected {expected}")
        self.command, self.found, self.expected = command, found, expected


class Skip(Exception):
    """The machine cannot do what the case needs."""


@dataclass
class Case:
    """One attack. `run` takes a Box and raises Fault or Skip; `counts` says how many passed cases it stands for."""
    family: str
    name: str
    run: object
    short: bool = False
    seconds: float = 240  # limit of the whole case

    @property
    def title(self):
        return f"{self.family}/{self.name}"


@dataclass
class Limits:
    """What a command may take, in the units of bash's ulimit; None leaves the machine's limit."""
    memory_kib: int | None = 8 * 2**20
    file_kib: int | None = 512 * 2**10
    cpu_seconds: int | None = 120
    other: dict = field(default_factory=dict)  # letter of ulimit: value

    def script(self):
        values = {"v": self.memory_kib, "f": self.file_kib, "t": self.cpu_seconds, **self.other}
        parts = [f"ulimit -{letter} {value}" for letter, value in values.items()
                 if value is not None and is_within_hard_limit(letter, value)]
        return " && ".join(parts + ['exec "$@"'])


RESOURCES = {"v": (resource.RLIMIT_AS, 1024), "f": (resource.RLIMIT_FSIZE, 1024), "t": (resource.RLIMIT_CPU, 1),
             "n": (resource.RLIMIT_NOFILE, 1), "s": (resource.RLIMIT_STACK, 1024), "u": (resource.RLIMIT_NPROC, 1)}


def is_within_hard_limit(letter, value):
    kind, unit = RESOURCES[letter]
    hard = resource.getrlimit(kind)[1]
    return hard == resource.RLIM_INFINITY or value * unit <= hard


@dataclass
class Finished:
    """How a command ended: `code` is negative for a signal, None where it had to be ended."""
    command: str
    code: int | None
    out: str
    err: str
    seconds: float

    def ended(self):
        if self.code is None:
            return f"no end after {self.seconds:.0f} s"
        return f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"

    def fault(self, expected, found=None):
        tail = " | ".join(self.err.strip().splitlines()[-4:])[-500:]
        return Fault(self.command, f"{found or self.ended()}; standard error: {tail or '(nothing)'}", expected)


class Child:
    """A command that runs, with its output in files, in a session of its own."""

    def __init__(self, box, arguments, environment=None, limits=None, stdout=None, prefix=()):
        if box.attack.stopping:
            raise Skip("the attack was stopped")
        self.box = box
        limits = limits or box.limits
        words = [*prefix, "bash", "-c", limits.script(), "bash", *map(str, arguments)]
        self.command = " ".join([f"{k}={shlex.quote(str(v))}" for k, v in (environment or {}).items()] +
                                [shlex.quote(abbreviate(word)) for word in words])
        number = box.next_number()
        self.out_path, self.err_path = box.path(f"out-{number}"), box.path(f"err-{number}")
        variables = {**box.attack.environment, **{k: str(v) for k, v in (environment or {}).items()}}
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out if stdout is None else stdout,
                                            stderr=err, env=variables, cwd=box.folder, start_new_session=True)
        self.started = time.monotonic()
        box.children.append(self)

    def out(self):
        return read_text(self.out_path)

    def err(self):
        return read_text(self.err_path)

    def running(self):
        return self.process.poll() is None

    def send(self, number):
        """A signal to the process itself, not to those that it started."""
        if self.running():
            self.process.send_signal(number)

    def wait_for(self, text, seconds=PATIENCE, count=1):
        """Waits until standard output holds `text` so often; whether it does before the end."""
        end = min(time.monotonic() + seconds, self.box.deadline)
        while True:
            running = self.running()
            if self.out().count(text) >= count:
                return True
            if not running or time.monotonic() > end:
                return False
            time.sleep(0.005)

    def finish(self, seconds=PATIENCE):
        """Waits for the end; a command that takes longer is killed and has no exit code."""
        limit = max(0.1, min(seconds, self.box.deadline - time.monotonic()))
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            self.end()
        return Finished(self.command, code, self.out(), self.err(), time.monotonic() - self.started)

    def end(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


class Box:
    """A case's folder, random numbers, and what it started."""

    def __init__(self, attack, case, folder):
        self.attack, self.folder = attack, folder
        self.random = random.Random(f"{attack.seed}/{case.title}")
        self.deadline = time.monotonic() + case.seconds
        self.children, self.passed, self.limits = [], 0, Limits()
        self._number, self._lock = 0, threading.Lock()
        os.makedirs(folder)

    @property
    def tessera(self):
        return self.attack.binary

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def next_number(self):
        with self._lock:
            self._number += 1
            return self._number

    def start(self, *arguments, **options):
        return Child(self, [self.tessera, *arguments], **options)

    def start_program(self, words, **options):
        return Child(self, words, **options)

    def run(self, *arguments, seconds=PATIENCE, **options):
        return self.start(*arguments, **options).finish(seconds)

    def copy(self, source, name):
        target = self.path(name)
        if os.path.isdir(source):
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy2(source, target)
        return target

    def write(self, name, content):
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        return path

    def close(self):
        for child in self.children:
            if child.running():
                child.end()


def abbreviate(word):
    return word if len(word) <= 200 else f"{word[:120]}...({len(word)} characters)"


def read_text(path):
    """The file's text; of a long one the start and the end."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(OUTPUT_READ)
            if size > 2 * OUTPUT_READ:
                file.seek(-OUTPUT_READ, os.SEEK_END)
            data += file.read(OUTPUT_READ)
    except FileNotFoundError:
        return ""
    return data.decode("utf-8", "replace")


def expect(finished, codes=(0, USER_ERROR), says=(), says_not=()):
    """The command ended by itself with one of the codes, an error with a message of bearable length and without
    internal errors; standard error holds `says` (regular expressions, without case)."""
    expect_end(finished, codes)
    if finished.code != 0:
        expect_message(finished)
    for pattern in says:
        if not re.search(pattern, finished.err, re.IGNORECASE):
            raise finished.fault(f"a message like '{pattern}'", found=f"{finished.ended()} without it")
    for pattern in says_not:
        if re.search(pattern, finished.err, re.IGNORECASE):
            raise finished.fault(f"no message like '{pattern}'", found=f"{finished.ended()} with it")
    return finished


def expect_ranks(finished, codes):
    """The same of a run's ranks, of which one may speak for all; what they said together."""
    for one in finished:
        expect_end(one, codes)
    told = "".join(one.err for one in finished)
    failed = [one for one in finished if one.code != 0]
    if failed and not re.search(r"^tessera: .", told, re.MULTILINE):
        raise failed[0].fault("a message of one rank at least", found=f"{failed[0].ended()} without a message")
    return told


def expect_end(finished, codes):
    if finished.code is None or finished.code < 0 or finished.code >= 128:
        raise finished.fault(f"an end by itself with exit code {show_codes(codes)}")
    if "internal error" in finished.err:
        raise finished.fault("no internal error", found=f"an internal error (exit code {finished.code})")
    if finished.code not in codes:
        raise finished.fault(f"exit code {show_codes(codes)}")


def expect_message(finished):
    if not re.search(r"^tessera: .", finished.err, re.MULTILINE):
        raise finished.fault("a message 'tessera: ...'", found=f"{finished.ended()} without a message")
    if len(finished.err) > MESSAGE_LENGTH:
        raise finished.fault("a message that can be read", found=f"{len(finished.err)} characters of message")


def show_codes(codes):
    return " or ".join(map(str, codes))


def free_port():
    """A port of the loopback that nothing uses now, and that no outgoing connection gets."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as server:
            try:
                server.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def need_program(name):
    if shutil.which(name) is None:
        raise Skip(f"no {name}")


def is_root():
    return os.geteuid() == 0
