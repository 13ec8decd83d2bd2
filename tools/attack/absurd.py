"""Values that nobody means, and commands that must not take them ill."""
import signal
import time

from attack.harness import PATIENCE, Fault, Limits, expect

BEYOND = ("9223372036854775808", "18446744073709551616", "-9223372036854775809", "9" * 300)  # no 64-bit integer
NO_NUMBERS = ("", "x", "1x", "--", "[1]", "\u0661")
INTEGERS = ("0", "-1", "1", "2147483647", "2147483648", "4294967297", "4611686018427387904", "9223372036854775807", "1.5")
NUMBERS = ("0", "-1", "1e30", "1e-300", "1e308", "-0.0")
NOT_FINITE = ("nan", "inf", "-inf", "1e400")
WORDS = ("", "x", "-1", "\u00e4\u0301\u202e", "a\nb", "\x1b[31m", "x" * 3000, "x" * 100_000, "..", "/proc", "[", "{}",
         "%s%n")
LISTS = ("", "[]", "[0]", "[-1]", "[9223372036854775807]", "[18446744073709551616]", "[[1]]", '["x"]', "[1,1]", "1", "x",
         "[" * 20_000, "[" + "1," * 20_000 + "1]", "[nan]", "[1")
FLAGS = ("", "x", "2", "yes", "TRUE", "0")
QUICK = Limits(memory_kib=4 * 2**20, cpu_seconds=30)
BAD_WORDS = (r"\d{100}", "must be above 0, found (inf|nan)")  # neither is above anything


def is_no_number(value, unsigned=False):
    """Whether it cannot be the value of an option with a number; `unsigned` ones may take one bit more."""
    if unsigned and value == BEYOND[0]:
        return False
    return value in BEYOND or value in NO_NUMBERS or value in NOT_FINITE


def try_values(values, attempt):
    """Calls `attempt(number, value)` for each value; a fault names all values that had one."""
    faults = {}
    for i, value in enumerate(values):
        try:
            attempt(i, value)
        except Fault as fault:
            faults[value] = fault
    if faults:
        first = next(iter(faults.values()))
        more = ", ".join(value[:24] for value in list(faults)[1:])
        raise Fault(first.command, first.found + (f" (and at fault: {more})" if more else ""), first.expected)


def expect_quick_end(child, value, must_refuse, endless=False):
    """The command ends by itself in time, or computes: `endless` ones may, after a start, until they are stopped."""
    end = time.monotonic() + PATIENCE
    seen = None
    while child.running() and time.monotonic() < end:
        if seen is None and (endless or "   step " in child.out()):
            seen = time.monotonic()
        if seen is not None and time.monotonic() > seen + 2:
            return stop(child)
        time.sleep(0.01)
    says_not = [] if len(value) >= 100 else BAD_WORDS  # may be repeated, to some length
    finished = expect(child.finish(0.1), codes=(2,) if must_refuse else (0, 2), says_not=says_not)
    if must_refuse:
        expect(finished, codes=(2,), says_not=["found the string '?[-0-9]"])
    return finished


def stop(child):
    """Ends what computes: a step of an absurd size need not come to its end."""
    child.send(signal.SIGTERM)
    finished = child.finish(5)
    if finished.code is not None and finished.code != -signal.SIGTERM:
        expect(finished, codes=(0, 2))
    return finished
