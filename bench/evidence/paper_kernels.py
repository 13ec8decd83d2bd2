"""What kernels of rows' software reach, where their makers have published it: shares of the rates by operators' names, for --operator-share."""
import functools
import pathlib
import tomllib

HOPPER = ("h100", "h200", "h800")
HARDWARE = pathlib.Path(__file__).parents[2] / "configs" / "hardware"

LATENT = ("DeepSeek", "Kimi", "Moonlight")
# TFLOPS of cuDNN 9.22's causal attention forward and backward, by tokens: cudnn-frontend, benchmark/sdpa_benchmark_training/results, 2026-04-24
# (llama3.1: 64 heads of 128 over 8; dsv3: 128 heads of 192 and 128). Backward ones count five products for each two of forward; here the
# scores' second computation is not counted, so four.
CUDNN = {
    ("gb200", "plain", "bf16"): {2048: (1097, 885), 4096: (1408, 1148), 8192: (1574, 1332), 16384: (1708, 1328), 32768: (1622, 1226)},
    ("gb200", "plain", "fp8"): {2048: (1420, 831), 4096: (1805, 1178), 8192: (2047, 1454), 16384: (2154, 1632), 32768: (2197, 1687)},
    ("gb200", "latent", "bf16"): {2048: (1072, 846), 4096: (1406, 1057), 8192: (1585, 1193), 16384: (1678, 1134), 32768: (1743, 1076)},
    ("gb200", "latent", "fp8"): {2048: (1659, 1312), 4096: (2095, 1692), 8192: (2397, 1959), 16384: (2486, 1968), 32768: (2447, 1857)},
    ("gb300", "plain", "bf16"): {2048: (1373, 967), 4096: (1703, 1248), 8192: (1856, 1435), 16384: (1915, 1507), 32768: (1953, 1490)},
    ("gb300", "plain", "fp8"): {2048: (1954, 944), 4096: (2532, 1396), 8192: (2897, 1781), 16384: (3054, 2035), 32768: (3108, 2128)},
    ("gb300", "latent", "bf16"): {2048: (1285, 914), 4096: (1590, 1143), 8192: (1825, 1291), 16384: (1967, 1302), 32768: (1991, 1289)},
    ("gb300", "latent", "fp8"): {2048: (2290, 1511), 4096: (2788, 1982), 8192: (3128, 2310), 16384: (3305, 2459), 32768: (3364, 2406)},
    # cuDNN 9.19 on an H200, whose products are an H100's: results of 2026-02-27.
    ("h100", "plain", "bf16"): {2048: (484, 370), 4096: (591, 474), 8192: (644, 541), 16384: (673, 579), 32768: (688, 581)},
    # Table 9 of Megatron-Core MoE.
    ("h100", "latent", "bf16"): {4096: (553, 422), 16384: (638, 523)},
}


@functools.lru_cache
def bf16_tflops(name):
    """Of a hardware's data sheet. Kernels were timed one at a time: what power leaves of them in a step is the hardware's reach."""
    return tomllib.loads((HARDWARE / f"{name}.toml").read_text())["device"]["bf16_tflops"]


def attention_shares(row, fp8, recent):
    """Of attention, also around a ring, as cuDNN has it; nothing where its makers have not published such heads (gpt-oss's have 64 elements and
    sinks, Qwen3-Next's 256), or where software is not `recent` and a Hopper's kernels were others."""
    heads = "latent" if row["model"].startswith(LATENT) else "plain"
    device = "h100" if row["hardware"] in HOPPER else "gb300" if row["hardware"].endswith("b300") else "gb200"
    timed = CUDNN.get((device, heads, "fp8" if fp8 else "bf16"))
    older = device == "h100" and heads == "plain" and not recent
    if timed is None or older or row["model"].startswith(("GPT-OSS", "Qwen3-Next")):
        return {}
    length = min(timed, key=lambda tokens: abs(tokens.bit_length() - row["sequence_length"].bit_length()))
    forward, backward = timed[length]
    peak = bf16_tflops({"h100": "h100-ib", "gb200": "gb200-nvl72", "gb300": "gb300-nvl72"}[device])
    # A Hopper's rings take more than their kernels: results of each step are joined in F32, which nobody has timed.
    kinds = ("",) if device == "h100" and heads == "plain" else ("", "ring_")
    return {f"{kind}attention{end}": round(tflops / peak, 3) for kind in kinds
            for end, tflops in (("", forward), ("_backward", 0.8 * backward))}


# Of mamba-ssm's chunked scan forward on an H100: 8,192 tokens of 128 heads of 64, states of 128, in 649 us (vllm-project/vllm, pull request 27299,
# "Original"), where 0.27 GB would take 81 us. Of the gradient, which computes the states again, no time is published: it is taken to reach as much.
MAMBA_SCAN = 0.124


def scan_shares(row):
    if not row["model"].startswith("Nemotron-3"):
        return {}
    return {"ssd_scan": MAMBA_SCAN, "ssd_scan_backward": MAMBA_SCAN}
