"""What the rivals' scripts share: the shapes of the MoE layers, and how a layer of PyTorch is timed.

As in `tessera bench --layer=moe`, each pass begins with an empty cache and a host that waits, and ends when the GPU is
done. The backward pass gives the gradients of the hidden states and of all weights. FLOPs: those of the router's and
the experts' products, twice as many backward.
"""
import argparse
import collections
import json
import time

import torch

Shape = collections.namedtuple("Shape", "experts top_k inner hidden")  # inner: of an expert, gate and up each
SHAPES = {
    "qwen3": Shape(128, 8, 768, 2048),
    "fine": Shape(128, 8, 256, 1536),
    "mixtral": Shape(8, 2, 14336, 4096),
}
FLUSH_BYTES = 256 << 20
DEVIATION = 0.02  # of random weights


def add_arguments(parser):
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to try a script")
    parser.add_argument("--json", action="store_true")


class Stopwatch:
    """Seconds of a pass from an empty cache, with the GPU done before and after."""

    def __init__(self, device):
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def time(self, run):
        self.flush.zero_()
        self.wait()
        start = time.perf_counter()
        result = run()
        self.wait()
        return time.perf_counter() - start, result


def time_layer(run, parameters, hidden, arguments):
    """Seconds of each pass of `run`, and the bytes that its forward pass keeps beside its output."""
    parameters = list(parameters)
    stopwatch = Stopwatch(arguments.device)
    in_use = torch.cuda.memory_allocated if arguments.device == "cuda" else lambda: 0
    grad = torch.randn_like(hidden)
    times = {"forward": [], "backward": []}
    for index in range(arguments.warmup + arguments.runs):
        out = None  # the last run's is not part of what is there before
        before = in_use()
        forward, out = stopwatch.time(lambda: run(hidden))
        saved = max(0, in_use() - before - out.numel() * out.element_size())
        backward, _ = stopwatch.time(lambda: out.backward(grad))
        without = [name for name, tensor in [("hidden", hidden), *parameters] if tensor.grad is None]
        if without:
            raise SystemExit(f"no gradient of {', '.join(without)}")
        for _, tensor in [("hidden", hidden), *parameters]:
            tensor.grad = None
        if index >= arguments.warmup:
            times["forward"].append(forward)
            times["backward"].append(backward)
    return times, saved


def expert_load(chosen, num_experts):
    """Assignments of the busiest expert over the mean."""
    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    return counts.max().item() * num_experts / counts.sum().item()


def report(who, name, shape, times, saved, arguments, **more):
    """Prints a layer's times, rates and memory, as JSON where asked."""
    flops = 2 * arguments.tokens * shape.hidden * (3 * shape.top_k * shape.inner + shape.experts)
    result = {"who": who, "shape": name, "tokens": arguments.tokens, "saved_bytes": saved, **more}
    for part, factor in (("forward", 1), ("backward", 2)):
        seconds = sorted(times[part])
        median = seconds[len(seconds) // 2]
        result[part] = {"seconds": seconds, "median_seconds": median, "flops": factor * flops,
                        "tflops": factor * flops / median / 1e12}
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{who}, {name}, {arguments.tokens} tokens, {saved / 2**20:.0f} MiB kept for the backward pass"
          + "".join(f", {key} {value:.2f}" for key, value in more.items()))
    for part in times:
        print(f"{part:8} {1e3 * result[part]['median_seconds']:9.3f} ms, {result[part]['tflops']:.1f} TFLOPS")
