"""Ranks that were not told the same: they say which key differs on which rank, at once, and nobody trains."""
from attack.harness import Case, expect, expect_ranks, free_port, is_root, need_program
from attack.rank_kills import torch_environment
from attack.stock import MODEL, train, write_text

# Key: what rank 1 has instead of the others' value.
DIFFERENCES = {
    "optim.learning_rate": "2e-3", "optim.beta1": "0.8", "optim.beta2": "0.9", "optim.eps": "1e-6",
    "optim.weight_decay": "0.2", "optim.warmup_steps": "2", "optim.schedule": "linear", "optim.min_lr_ratio": "0.2",
    "optim.shard": "none", "optim.gradient_compression": "bf16", "optim.bucket_bytes": "4096", "optim.decay_all": "true",
    "run.seed": "2", "run.checkpoint_interval": "3", "train.steps": "7", "train.precision": "bf16",
    "train.global_batch": "8", "train.micro_batch": "2", "train.max_grad_norm": "0.5", "train.on_nonfinite": "skip",
    "train.validation_interval": "2", "data.sequence_length": "8", "data.validation_fraction": "0.1",
    "data.packing": "best_fit", "data.split_documents": "true", "data.text": "other.txt", "model.hidden_size": "32",
    "model.num_layers": "3", "model.num_heads": "1", "model.vocab_size": "384", "model.norm_eps": "1e-6",
    "model.activation": "geglu", "model.tie_embeddings": "false", "model.init_deviation": "0.03",
    "model.qk_norm": "head", "model.mtp_layers": "1", "model.window": "4", "rope.base": "5000", "moe.top_k": "1",
    "moe.num_experts": "8", "moe.inner_size": "32", "moe.balance_coefficient": "0.02", "moe.capacity_factor": "1",
    "moe.score": "sigmoid", "moe.z_loss_coefficient": "0.1", "moe.shared_inner_size": "8", "moe.latent_size": "8",
    "parallel.tp": "2", "parallel.ep": "1", "parallel.dispatcher": "all_gather", "parallel.exchange": "bounded",
}
SHORT = {"optim.learning_rate", "run.seed", "moe.top_k", "data.sequence_length", "data.text", "parallel.tp"}
COMPLETE = torch_environment(0, 2, 1)
VARIABLES = [("RANK", "2"), ("RANK", "-1"), ("RANK", ""), ("RANK", "x"), ("RANK", "9" * 30), ("WORLD_SIZE", "0"),
             ("WORLD_SIZE", "-1"), ("WORLD_SIZE", "9223372036854775807"), ("WORLD_SIZE", "x"), ("LOCAL_RANK", "-1"),
             ("LOCAL_RANK", "7"), ("LOCAL_WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "3"), ("MASTER_PORT", "0"),
             ("MASTER_PORT", "65536"), ("MASTER_PORT", "x"), ("MASTER_ADDR", ""), ("MASTER_ADDR", "300.1.1.1"),
             ("MASTER_ADDR", "x" * 5000)]
OTHER_LAUNCHERS = [{"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "5"}, {"OMPI_COMM_WORLD_SIZE": "-1"},
                   {"OMPI_COMM_WORLD_SIZE": "x", "OMPI_COMM_WORLD_RANK": "0"},
                   {"SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "2"},
                   {"SLURM_STEP_ID": "0", "SLURM_PROCID": "x", "SLURM_STEP_NUM_TASKS": "2"},
                   {"TORCHELASTIC_RUN_ID": "x"}]


def cases(_attack):
    found = [Case("differing-ranks", f"{start.__name__}-{key}", lambda box, s=start, k=key: differ(box, s, k),
                  short=key in SHORT and start is tcp_pair) for start in (tcp_pair, mpi_pair) for key in DIFFERENCES]
    found += [Case("differing-ranks", f"third-of-four-{key}", lambda box, k=key: third_of_four(box, k))
              for key in sorted(SHORT)]
    found += [Case("differing-ranks", f"{start.__name__}-threads", lambda box, s=start: threads_may_differ(box, s),
                   short=start is tcp_pair) for start in (tcp_pair, mpi_pair)]
    incomplete = [("RANK", "WORLD_SIZE"), ("WORLD_SIZE",), ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
                  ("RANK", "WORLD_SIZE", "MASTER_ADDR"), ("RANK", "WORLD_SIZE", "MASTER_PORT"),
                  ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), ("RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"),
                  ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_RANK")]
    found += [Case("launchers", "only-" + "-".join(names), lambda box, n=names: incomplete_launch(box, n),
                   short=names == incomplete[0]) for names in incomplete]
    found += [Case("launchers", f"{name}-{i}", lambda box, n=name, v=value: absurd_launch(box, {**COMPLETE, n: v}),
                   short=i % 6 == 0) for i, (name, value) in enumerate(VARIABLES)]
    found += [Case("launchers", f"other-{i}", lambda box, e=environment: absurd_launch(box, e))
              for i, environment in enumerate(OTHER_LAUNCHERS)]
    return found


def pair_arguments(box, key=None, rank=0):
    """Arguments of a rank of two; rank 1's differ by the key."""
    arguments = train(box.attack.stock.text, box.path("run"), 6, "--parallel.ep=2", "--run.comm_timeout=600",
                      "--data.cache=" + box.path("tokens"))
    if key is None or rank != 1:
        return arguments
    value = DIFFERENCES[key]
    if key == "data.text":
        value = box.path(value)
        write_text(value, box.random, 6000)
    return [word for word in arguments if not word.startswith(f"--{key}=")] + [f"--{key}={value}"]


def tcp_pair(box, key=None, threads=(1, 1)):
    port = free_port()
    children = [box.start(*pair_arguments(box, key, rank),
                          environment={**torch_environment(rank, 2, port), "OMP_NUM_THREADS": threads[rank]})
                for rank in range(2)]
    return [child.finish() for child in children]


def mpirun_words():
    need_program("mpirun")
    return ["mpirun", "--oversubscribe", *(["--allow-run-as-root"] if is_root() else [])]


def mpi_pair(box, key=None, threads=(1, 1)):
    words = mpirun_words()
    for rank in range(2):
        words += [":"] * rank + ["-n", "1", "-x", f"OMP_NUM_THREADS={threads[rank]}", box.tessera,
                                 *pair_arguments(box, key, rank)]
    finished = box.start_program(words).finish()
    return [finished]


def differ(box, start, key):
    require_named(start(box, key), key)


def require_named(finished, key, rank=1):
    """All end with exit code 2; one of them says which key differs on which rank."""
    told = expect_ranks(finished, codes=(2,))
    if key not in told or f"rank {rank}" not in told:
        raise finished[0].fault(f"a message that names {key} and rank {rank}", found="another message")


def third_of_four(box, key):
    port = free_port()
    children = []
    for rank in range(4):
        arguments = pair_arguments(box, key, 1 if rank == 2 else 0)
        children.append(box.start(*arguments, environment=torch_environment(rank, 4, port)))
    require_named([child.finish() for child in children], key, rank=2)


def threads_may_differ(box, start):
    for one in start(box, threads=(1, 3)):
        expect(one, codes=(0,))


def incomplete_launch(box, names):
    """Some of a launcher's variables: what is missing is named, and no rank trains alone."""
    environment = {name: free_port() if name == "MASTER_PORT" else COMPLETE[name] for name in names}
    finished = box.run(*train(box.attack.stock.text, box.path("run"), 2, "--run.comm_timeout=5"),
                       environment=environment)
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in names]
    expect(finished, codes=(2,), says=["|".join(missing)])


def absurd_launch(box, environment):
    environment = {**environment}
    if environment.get("MASTER_PORT") == 1:
        environment["MASTER_PORT"] = free_port()
    finished = box.run("train", f"--data.text={box.attack.stock.text}", *MODEL, f"--run.folder={box.path('run')}",
                       "--run.comm_timeout=3", environment=environment)
    expect(finished, codes=(2,))
