"""Full disks, lost output, small limits and absurd numbers of threads."""
import os
import subprocess

from attack.harness import PATIENCE, Case, Limits, Skip, expect, is_root, need_program
from attack.rank_kills import mpirun
from attack.stock import LAST, MODEL, QUIET, checkpoints, final_digest, require_digest, train

NOBODY = 65534
# bash's ulimit letter and value: less of it than a run wants.
ULIMITS = [("s", 64), ("s", 128), ("s", 256), ("s", 1024), ("v", 100_000), ("v", 200_000), ("v", 400_000),
           ("v", 700_000), ("v", 1_500_000), ("f", 1), ("f", 10), ("f", 100), ("f", 150), ("n", 4), ("n", 5),
           ("n", 8), ("n", 12), ("n", 16), ("n", 24), ("t", 0)]
VARIABLES = [("OMP_NUM_THREADS", value) for value in
             ("100000", "64", "0", "-1", "abc", "99999999999999999999", "1,2,3", "")] + [
    ("OMP_STACKSIZE", "100G"), ("OMP_STACKSIZE", "1k"), ("OMP_THREAD_LIMIT", "1"), ("OMP_DYNAMIC", "true"),
    ("TMPDIR", "/nonexistent"), ("HOME", "/nonexistent"), ("LANG", "tr_TR.UTF-8"), ("LC_ALL", "de_DE.UTF-8"),
    ("TERM", "\x1b[31m"), ("COLUMNS", "0"), ("CUDA_VISIBLE_DEVICES", "9999"), ("LC_ALL", "x" * 10_000)]
SHORT_LIMITS = {("s", 64), ("v", 700_000), ("f", 100), ("n", 16)}


def cases(_attack):
    found = []
    for name in commands(None):
        found.append(Case("lost-output", f"full-{name}", lambda box, name=name: full_output(box, name),
                          short=name in ("generate", "eval", "inspect", "verify", "tokenize", "train", "help")))
        found.append(Case("lost-output", f"closed-{name}", lambda box, name=name: closed_output(box, name),
                          short=name in ("eval", "train")))
        found.append(Case("lost-output", f"pipe-{name}", lambda box, name=name: broken_pipe(box, name)))
    found += [Case("limits", f"ulimit-{letter}-{value}", lambda box, l=letter, v=value: small_limit(box, l, v),
                   short=(letter, value) in SHORT_LIMITS) for letter, value in ULIMITS]
    found += [Case("limits", f"processes-{count}", lambda box, count=count: few_processes(box, count),
                   short=count == 2) for count in (1, 2, 3)]
    found += [Case("limits", f"{name}-{value[:12].strip(chr(27))}-{i}",
                   lambda box, n=name, v=value: variable(box, n, v), short=value in ("100000", "abc"))
              for i, (name, value) in enumerate(VARIABLES)]
    found += [Case("limits", f"ranks-ulimit-{letter}-{value}", lambda box, l=letter, v=value: limited_ranks(box, l, v),
                   short=letter == "f") for letter, value in (("f", 100), ("f", 10), ("n", 16), ("s", 64))]
    found += [Case("full-disk", f"{kib}-kib", lambda box, kib=kib: small_disk(box, kib), short=kib in (300, 700))
              for kib in (40, 100, 150, 200, 250, 300, 350, 400, 500, 600, 700, 900)]
    found += [Case("full-disk", f"tokenize-{kib}-kib", lambda box, kib=kib: small_disk_for_tokens(box, kib),
                   short=kib == 20) for kib in (4, 20, 60)]
    return found


def commands(box):
    """Each command that prints, by name; without a box only the names count."""
    stock, path = (box.attack.stock, box.path) if box else (None, lambda name: name)
    run, text, hf = (stock.run, stock.text, stock.hf) if stock else ("", "", "")
    config = [*MODEL, *QUIET]
    return {
        "help": ["--help"], "version": ["--version"], "train-help": ["train", "--help"],
        "eval-help": ["eval", "--help"],
        "train": train(text, path("run"), 4), "print-config": ["train", "--print-config"],
        "print-config-json": ["train", "--print-config", "--json"],
        "verify": ["verify", *config, "--ranks", "2", "--parallel.ep=2", "--steps", "1"],
        "verify-json": ["verify", *config, "--ranks", "1", "--steps", "1", "--json"],
        "eval": ["eval", run, "--text", text, "--max-batches", "1"],
        "eval-json": ["eval", run, "--text", text, "--max-batches", "1", "--json"],
        "generate": ["generate", run, "--max-tokens", "3"],
        "generate-json": ["generate", run, "--max-tokens", "3", "--json"],
        "generate-logprobs": ["generate", run, "--max-tokens", "3", "--logprobs"],
        "tokenize": ["tokenize", text, "--tokenizer", "byte", "-o", path("tokens")],
        "tokenize-train": ["tokenize", text, "--train", path("learnt.json"), "--vocab-size", "300"],
        "inspect": ["inspect", *config, "--memory"], "inspect-program": ["inspect", *config, "--program"],
        "inspect-layout": ["inspect", *config, "--layout"], "presets": ["inspect", "--presets"],
        "inspect-schedule": ["inspect", *config, "--schedule", "--parallel.pp=2", "--ranks", "2"],
        "inspect-checkpoint": ["inspect", "--checkpoint", run],
        "convert": ["convert", run, path("hf")], "import": ["convert", hf, path("imported")],
        "upcycle": ["upcycle", stock.dense if stock else "", path("upcycled"), "--experts", "2"],
        "bench": ["bench", *config, "--steps", "1", "--warmup", "0"], "doctor": ["doctor"],
        "doctor-json": ["doctor", "--json"],
    }


def full_output(box, name):
    """What cannot be written is exit code 1 and a message."""
    if not os.path.exists("/dev/full"):
        raise Skip("no /dev/full")
    with open("/dev/full", "wb") as full:
        expect(box.run(*commands(box)[name], stdout=full), codes=(1,), says=["output|write"])


def closed_output(box, name):
    """No standard output at all: a message, and no file that takes its number is written into."""
    child = box.start(*commands(box)[name], prefix=["bash", "-c", 'exec "$@" >&-', "bash"])
    finished = child.finish()
    if name != "train":
        expect(finished, codes=(1,))
        return
    expect(finished, codes=(0, 1), says=["output"])
    require_sound_run(box, finished)


def require_sound_run(box, finished, steps=4, environment=None):
    """The run has a checkpoint, and continued it has the weights of an unbroken one; both with the threads that it had,
    on whose number oneDNN's sums may depend."""
    if not checkpoints(box.path("run")):
        raise finished.fault("a checkpoint", found=f"{finished.ended()} without a checkpoint")
    text = box.attack.stock.text
    ended = expect(box.run(*train(text, box.path("run"), steps + 3), environment=environment), codes=(0,))
    expect(box.run(*train(text, box.path("whole"), steps + 3), environment=environment), codes=(0,))
    require_digest(ended, box.path("run"), steps + 3, final_digest(box.path("whole")))


def broken_pipe(box, name):
    """A reader that goes away, as `head` does: a training saves; others end as they like, but in order."""
    steps = 60
    arguments = train(box.attack.stock.text, box.path("run"), steps) if name == "train" else commands(box)[name]
    reading, writing = os.pipe()
    child = box.start(*arguments, stdout=writing)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    finished = child.finish()
    if name == "train":
        expect(finished, codes=(0, 1), says=["output|pipe"])
        require_sound_run(box, finished, steps)
    elif finished.code != -13:  # SIGPIPE is how most programs end here
        expect(finished, codes=(0, 1))


def small_limit(box, letter, value):
    """A limit that is too small is named; what fits it works."""
    limits = Limits(other={letter: value})
    if letter in "vft":
        limits = Limits(**{{"v": "memory_kib", "f": "file_kib", "t": "cpu_seconds"}[letter]: value})
    environment = {"OMP_NUM_THREADS": 4}
    finished = box.run(*train(box.attack.stock.text, box.path("run"), 4), limits=limits, environment=environment)
    if finished.code == 127 and "shared libraries" in finished.err:
        raise Skip("a limit under which no program is loaded")
    if letter == "t" and finished.code == -9:
        raise Skip("the kernel kills for a limit of the CPU time")
    expect(finished, codes=(0, 1, 2))
    if finished.code == 0:
        require_sound_run(box, finished, environment=environment)


def few_processes(box, count):
    """RLIMIT_NPROC does not bind root, so another user's."""
    prefix = as_nobody(box)
    text = box.copy(box.attack.stock.text, "text.txt")
    limits = Limits(other={"u": count})
    finished = box.run(*train(text, box.path("run"), 4), limits=limits, environment={"OMP_NUM_THREADS": 8},
                       prefix=prefix)
    expect(finished, codes=(0, 1, 2))
    finished = box.run(*train(text, box.path("ranks"), 4, "--ranks", "2"), limits=limits, prefix=prefix)
    expect(finished, codes=(0, 1, 2))


def as_nobody(box):
    """The start of a command line that runs as a user without rights, whose folder the box's is from now on."""
    if not is_root():
        return []
    need_program("setpriv")
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    os.chown(box.folder, NOBODY, NOBODY)
    allowed = subprocess.run([*prefix, "test", "-x", box.tessera, "-a", "-w", box.folder], check=False)
    if allowed.returncode != 0:
        raise Skip("another user cannot run the program or write here")
    return prefix


def variable(box, name, value):
    finished = box.run(*train(box.attack.stock.text, box.path("run"), 4), environment={name: value},
                       limits=Limits(memory_kib=None))
    expect(finished, codes=(0, 2))


def limited_ranks(box, letter, value):
    """Several ranks say the same as one, before anything that mpirun has to say."""
    need_program("mpirun")
    box.limits = Limits(file_kib=value) if letter == "f" else Limits(other={letter: value})
    finished = mpirun(box, train(box.attack.stock.text, box.path("run"), 4)).first.finish()
    expect(finished, codes=(0, 1, 2), says_not=["mpirun (detected|noticed)", "MPI_ABORT was invoked"])


def mount_prefix():
    """The start of a command line that may mount, in a namespace of its own."""
    need_program("unshare")
    prefix = ["unshare", "-m"] if is_root() else ["unshare", "-rm"]
    probe = subprocess.run([*prefix, "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"], capture_output=True,
                           check=False)
    if probe.returncode != 0:
        raise Skip("cannot mount a tmpfs")
    return prefix


def on_small_disk(box, kib, arguments, mount):
    """Runs the command on a disk of this many KiB and again on a larger one; what lies there then is kept."""
    script = (f'mount -t tmpfs -o size={kib}k none {mount} && '
              f'("$@" >small.out 2>small.err; echo $? >small.code; mount -o remount,size=64m {mount}; "$@"; code=$?; '
              f'cp -a {mount}/. {box.path("kept")}; exit $code)')
    os.makedirs(mount)
    os.makedirs(box.path("kept"))
    prefix = [*mount_prefix(), "sh", "-c", script, "sh"]
    return box.run(*arguments, prefix=prefix, seconds=2 * PATIENCE)


def small_disk(box, kib):
    """A full disk is one message and a code for users; with more room the run ends like an unbroken one."""
    mount = box.path("disk")
    arguments = train(box.attack.stock.text, os.path.join(mount, "run"), LAST, "--run.checkpoint_interval=5")
    finished = on_small_disk(box, kib, arguments, mount)
    require_full_disk_message(box, finished)
    expect(finished, codes=(0,))
    require_digest(finished, box.path("kept", "run"), LAST, box.attack.stock.expected)


def require_full_disk_message(box, finished):
    with open(box.path("small.code"), encoding="ascii") as code, open(box.path("small.err"), encoding="utf-8") as err:
        first = type(finished)(finished.command, int(code.read()), "", err.read(), 0)
    expect(first, codes=(0, 1, 2))
    if first.code != 0:
        expect(first, codes=(1, 2), says=["space"])


def small_disk_for_tokens(box, kib):
    mount = box.path("disk")
    arguments = ["tokenize", box.attack.stock.text, "--tokenizer", "byte", "-o", os.path.join(mount, "tokens")]
    finished = on_small_disk(box, kib, arguments, mount)
    require_full_disk_message(box, finished)
    expect(finished, codes=(0,))
    with open(box.path("kept", "tokens.bin"), "rb") as found, open(box.attack.stock.tokens + ".bin", "rb") as expected:
        if found.read() != expected.read():
            raise finished.fault("the tokens of an unbroken run", found="other tokens")
