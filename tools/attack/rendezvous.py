"""Strangers at the port where ranks meet, ranks that never come, and ports that are taken."""
import random
import socket
import struct
import threading
import time

from attack.harness import Case, Fault, expect, expect_ranks, free_port
from attack.rank_kills import torch_environment
from attack.stock import final_digest, train

LOOPBACK = "127.0.0.1"
REPLAYS = 16


def cases(_attack):
    found = [Case("strangers", f"{stranger.__name__}-{i}", lambda box, s=stranger: visit(box, s),
                  short=i == 0 and stranger in (garbage, holders, slow)) for stranger in STRANGERS for i in range(3)]
    found += [Case("strangers", f"cut-hello-{i}", lambda box: visit_with_hello(box, cut), short=i == 0)
              for i in range(REPLAYS)]
    found += [Case("strangers", f"changed-hello-{i}", lambda box: visit_with_hello(box, change)) for i in range(REPLAYS)]
    found += [Case("false-rank-0", f"{name}-{i}", lambda box, a=answer: false_rank_0(box, a), short=name == "garbage")
              for name, answer in ANSWERS.items() for i in range(2)]
    found += [Case("absent-ranks", f"rank-{rank}", lambda box, r=rank: absent(box, r), short=rank == 0)
              for rank in (0, 1)]
    found += [Case("absent-ranks", "port-taken", port_taken, short=True), Case("absent-ranks", "rank-twice", rank_twice),
              Case("absent-ranks", "two-runs-one-port", two_runs)]
    return found


def start_rank(box, rank, port, *options, run="run", num_ranks=2):
    arguments = train(box.attack.stock.text, box.path(run), 6, "--parallel.ep=2", "--run.comm_timeout=60", *options)
    return box.start(*arguments, environment=torch_environment(rank, num_ranks, port))


def connect(port, seconds=30):
    """A connection to whoever listens at the port, which may not be there yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for address in ("::1", LOOPBACK):
            try:
                return socket.create_connection((address, port), timeout=5)
            except OSError:
                continue
        time.sleep(0.02)
    raise Fault(f"port {port}", "nobody listens", "rank 0 at its port")


def send(port, data):
    """Connects and sends; the other side may hang up meanwhile. The open connection."""
    stream = connect(port)
    try:
        stream.sendall(data)
    except OSError:
        pass
    return stream


def hang_up(port, _draw):
    for _ in range(200):
        connect(port).close()
    return []


def garbage(port, draw):
    return [send(port, draw.randbytes(draw.choice((1, 7, 64, 500, 5000)))) for _ in range(40)]


def garbage_and_hang_up(port, draw):
    for _ in range(40):
        send(port, draw.randbytes(draw.randrange(1, 2000))).close()
    return []


def holders(port, _draw):
    return [connect(port) for _ in range(60)]


def slow(port, draw):
    streams = [connect(port) for _ in range(5)]
    for _ in range(10):
        for stream in streams:
            try:
                stream.sendall(draw.randbytes(1))
            except OSError:
                pass
        time.sleep(0.05)
    return streams


def http(port, _draw):
    return [send(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(10)]


def huge_lengths(port, _draw):
    return [send(port, word * 16) for word in (b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\xff" * 7 + b"\x7f", bytes(8))]


def much(port, draw):
    return [send(port, draw.randbytes(2**20)) for _ in range(4)]


def half_closed(port, _draw):
    streams = [connect(port) for _ in range(10)]
    for stream in streams:
        stream.shutdown(socket.SHUT_WR)
    return streams


def reset(port, _draw):
    for _ in range(50):
        stream = send(port, b"hello")
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.close()
    return []


STRANGERS = (hang_up, garbage, garbage_and_hang_up, holders, slow, http, huge_lengths, much, half_closed, reset)


def visit(box, stranger):
    """Two ranks meet and train as if the stranger had not come."""
    clean = [start_rank(box, rank, port, run="clean") for port in [free_port()] for rank in range(2)]
    for child in clean:
        expect(child.finish(), codes=(0,))
    port = free_port()
    first = start_rank(box, 0, port)
    streams = stranger(port, box.random)
    second = start_rank(box, 1, port)
    finished = [expect(child.finish(), codes=(0,)) for child in (first, second)]
    for stream in streams:
        stream.close()
    if final_digest(box.path("run")) != final_digest(box.path("clean")):
        raise finished[0].fault("the weights of undisturbed ranks", found="other weights")


def first_words(box):
    """What a genuine rank 1 says first."""
    with socket.create_server((LOOPBACK, 0)) as server:
        server.settimeout(60)
        child = start_rank(box, 1, server.getsockname()[1], run="hello")
        try:
            stream, _ = server.accept()
            with stream:
                stream.settimeout(5)
                return stream.recv(65536)
        except OSError:
            raise Fault(child.command, "no connection of rank 1", "one to rank 0's port") from None
        finally:
            child.end()


def cut(hello, draw):
    return hello[:draw.randrange(len(hello))]


def change(hello, draw):
    data = bytearray(hello)
    for _ in range(draw.randrange(1, 4)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def visit_with_hello(box, spoil):
    """A stranger who speaks nearly as ranks do. One who says all of it is a rank, so then only the end counts."""
    hello = first_words(box)
    port = free_port()
    first = start_rank(box, 0, port, "--run.comm_timeout=8")
    stream = send(port, spoil(hello, box.random) if hello else b"")
    second = start_rank(box, 1, port, "--run.comm_timeout=8")
    codes = (0,) if spoil is cut else (0, 2)
    expect_ranks([child.finish() for child in (first, second)], codes)
    stream.close()


ANSWERS = {"garbage": lambda draw: draw.randbytes(500), "silence": lambda draw: b"", "zeros": lambda draw: bytes(4096),
           "huge": lambda draw: b"\xff" * 64, "much": lambda draw: draw.randbytes(2**20), "hang-up": lambda draw: None}


def false_rank_0(box, answer):
    """Whoever answers at rank 0's port with something else: rank 1 ends in time and says so."""
    with socket.create_server((LOOPBACK, 0), backlog=64) as server:
        done = threading.Event()
        thread = threading.Thread(target=serve, args=(server, answer, box.random.random(), done), daemon=True)
        thread.start()
        child = start_rank(box, 1, server.getsockname()[1], "--run.comm_timeout=5")
        finished = child.finish()
        done.set()
        thread.join(10)
    expect(finished, codes=(2,), says=["rank 0|127.0.0.1"])


def serve(server, answer, seed, done):
    draw, streams = random.Random(seed), []
    server.settimeout(0.1)
    while not done.is_set():
        try:
            stream, _ = server.accept()
        except OSError:
            continue
        data = answer(draw)
        if data is None:
            stream.close()
            continue
        stream.settimeout(1)
        try:
            stream.sendall(data)
        except OSError:
            pass
        streams.append(stream)
    for stream in streams:
        stream.close()


def absent(box, rank):
    """A rank that waits for another which never comes names it after comm_timeout."""
    finished = start_rank(box, rank, free_port(), "--run.comm_timeout=4").finish()
    expect(finished, codes=(2,), says=[f"rank {1 - rank}"])


def port_taken(box):
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        finished = start_rank(box, 0, port, "--run.comm_timeout=5").finish()
    expect(finished, codes=(2,), says=[str(port)])


def rank_twice(box):
    """Two processes that both say they are rank 1."""
    port = free_port()
    children = [start_rank(box, rank, port, "--run.comm_timeout=8") for rank in (0, 1, 1)]
    finished = [child.finish() for child in children]
    expect_ranks(finished, codes=(0, 2))
    if all(one.code == 0 for one in finished):
        raise finished[0].fault("a refusal of one rank 1", found="three ranks of two that trained")


def two_runs(box):
    """Two runs of two ranks that were given one port: whatever trains, trains what it was told."""
    clean = [start_rank(box, rank, port, run="clean") for port in [free_port()] for rank in range(2)]
    for child in clean:
        expect(child.finish(), codes=(0,))
    port = free_port()
    children = [start_rank(box, rank, port, "--run.comm_timeout=8", *options, run=run) for rank in range(2)
                for run, options in (("one", []), ("two", ["--run.seed=2"]))]
    finished = [child.finish() for child in children]
    expect_ranks(finished, codes=(0, 2))
    if finished[0].code == 0 and final_digest(box.path("one")) != final_digest(box.path("clean")):
        raise finished[0].fault("the weights of undisturbed ranks", found="other weights")
