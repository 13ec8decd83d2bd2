"""Random layouts of ranks and random models: `verify` finds them to agree with one rank."""
from attack.harness import Case, Fault, Limits, expect

NUM_LAYOUTS = 40
TRIES = 60
MODEL = ["--model.hidden_size=32", "--model.num_layers=4", "--model.num_heads=4", "--model.vocab_size=320",
         "--moe.inner_size=16", "--data.sequence_length=32", "--train.micro_batch=2", "--train.global_batch=16",
         "--run.device=cpu"]


def cases(_attack):
    return [Case("layouts", str(i), verify, short=i < 3) for i in range(NUM_LAYOUTS)]


def draw_options(draw):
    one_of = draw.choice
    degrees = {name: one_of((1, 1, 2)) for name in ("tp", "cp", "pp")}
    ranks = degrees["tp"] * degrees["cp"] * degrees["pp"] * one_of((1, 2))
    options = {f"parallel.{name}": value for name, value in degrees.items()}
    options |= {"parallel.ep": one_of((1, 2, 4)), "parallel.etp": one_of((1, 1, 2)), "moe.num_experts": one_of((4, 8)),
                "moe.top_k": one_of((1, 2, 3)), "model.num_kv_heads": one_of((2, 4)), "model.qk_norm": one_of(
                    ("none", "head", "all")), "model.tie_embeddings": one_of(("true", "false")),
                "optim.shard": one_of(("none", "state", "full")), "moe.shared_inner_size": one_of((0, 0, 16)),
                "moe.latent_size": one_of((0, 0, 16)), "moe.first_dense_layers": one_of((0, 0, 1)),
                "parallel.attention": one_of(("tensor", "tensor", "ulysses")), "moe.score": one_of(("softmax", "sigmoid")),
                "parallel.dispatcher": one_of(("auto", "all_to_all", "all_gather")), "parallel.exchange": one_of(
                    ("exact", "exact", "bounded")), "model.attention": one_of(("standard", "standard", "latent")),
                "parallel.context": one_of(("ring", "all_to_all")), "moe.fuse_activation": one_of(("true", "false")),
                "model.activation": one_of(("swiglu", "geglu", "gelu")), "moe.balance_scope": one_of(
                    ("micro_batch", "sequence", "global_batch")), "model.mtp_layers": one_of((0, 0, 1))}
    if degrees["pp"] == 2:
        options |= {"parallel.split_weights": one_of(("true", "false")), "parallel.pipeline_schedule": one_of(
            ("gpipe", "1f1b")), "train.micro_batch": 1}
    if draw.random() < 0.3:
        options |= {"moe.capacity_factor": one_of((1, 1.5)), "moe.capacity_scope": "sequence"}
    if draw.random() < 0.3:
        options["train.recompute"] = '["all"]'
    return ranks, [f"--{key}={value}" for key, value in options.items()]


def verify(box):
    """Draws until a layout is one that the program takes; that must agree."""
    for _ in range(TRIES):
        ranks, options = draw_options(box.random)
        finished = box.run("verify", *MODEL, *options, "--ranks", ranks, limits=Limits(cpu_seconds=240), seconds=200)
        expect(finished, codes=(0, 2))
        if finished.code == 0:
            return
    raise Fault("verify", f"{TRIES} random layouts refused", "one that is valid")
