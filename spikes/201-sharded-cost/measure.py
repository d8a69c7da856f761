"""Steps of the trainer on real traces in `gloo` processes: unsharded, sharded and levelled; CPU seconds, bytes and memory.

    COMPOSER_DATA=FOLDER python spikes/201-sharded-cost/measure.py

writes measured.json. Each job is one group of processes; a rank tells its steps in a file.
"""
import argparse
import gc
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

warnings.filterwarnings("ignore")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *(str(HERE.parents[1] / folder) for folder in ("tests", "tests/contrib/fsdp", "."))]
LIMIT = 240  # seconds that a job may take
SHAPE = dict(hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
             head_dim=64, vocab_size=4096, max_position_embeddings=4096, tie_word_embeddings=True)
STEPS, WARM = 3, 1  # that are measured, and before them


@dataclass(frozen=True)
class Job:
    "One group of processes."

    name: str
    ranks: int
    sharded: bool = True
    rows: int = 4  # on all ranks
    alike: bool = False  # all ranks hold the same rows, so that none is idle
    checkpointing: bool = False
    teacher: str = "frozen"
    clone: bool = False  # the teacher is a second sharded model
    accumulation: int = 1  # backward passes in a step
    channels: bool = True  # 2 and 3


def jobs() -> list[Job]:
    found = []
    for ranks in (2, 4):  # one deal of four rows
        found += [Job(f"unsharded, {ranks}", ranks, sharded=False), Job(f"sharded, {ranks}", ranks),
                  Job(f"unsharded, checkpointing, {ranks}", ranks, sharded=False, checkpointing=True),
                  Job(f"sharded, checkpointing, {ranks}", ranks, checkpointing=True)]
    found += [Job(f"alike, {ranks}", ranks, rows=2 * ranks, alike=True) for ranks in (1, 2, 4)]
    found += [Job(f"alike, unsharded, {ranks}", ranks, rows=2 * ranks, alike=True, sharded=False) for ranks in (1, 2, 4)]
    found += [Job("policy alone, accumulation", 2, channels=False, accumulation=4), Job("clone, 2", 2, clone=True)]
    return found


# ---- rows

def real_rows(data: Path) -> list[dict]:
    "Four real traces with error turns as rows, ids folded to the model's vocabulary; as plain values."
    import simulate

    from composer_replication.core.trace import Trace, Turn
    from composer_replication.tree.example import RolloutTree
    trees = [t for t in simulate.trees_of(data, "SQL", "every error turn") if 200 < len(t.ids) < 600 and t.branches]
    nothing = Trace("real", (Turn("user", "x"), Turn("assistant", "y")))  # the trainer reads the tree
    rows = [json.loads(json.dumps(RolloutTree(nothing, t).to_data(), default=list)) for t in random.Random(1).sample(trees, 4)]
    fold = lambda ids: [5 + i % (SHAPE["vocab_size"] - 5) for i in ids]
    for row in rows:
        row["tree"]["ids"] = fold(row["tree"]["ids"])
        for branch in row["tree"]["branches"]:
            branch["ids"] = fold(branch["ids"])
    return rows


def rows_of(dealt: list[dict], job: Job) -> list:
    "The job's rows, those of the first rank first."
    from composer_replication.tree.example import RolloutTree
    rows = [RolloutTree.from_data(row) for row in dealt]
    rows = rows if job.channels else [replace(r, tree=replace(r.tree, branches=())) for r in rows]
    return rows[:2] * job.ranks if job.alike else rows


def batch_of(rows, pad):
    "What TRL's `_compute_loss` reads, prompts padded on the left and completions on the right."
    import torch
    first = [r.tree.spans[0].start for r in rows]
    before, after = max(first), max(len(r.tree.ids) - f for r, f in zip(rows, first))
    column = lambda: torch.zeros(len(rows), after, dtype=torch.long)
    made = {"prompt_ids": torch.full((len(rows), before), pad), "prompt_mask": torch.zeros(len(rows), before, dtype=torch.long),
            "completion_ids": torch.full((len(rows), after), pad), "completion_mask": column(), "tool_mask": column()}
    for i, (row, f) in enumerate(zip(rows, first)):
        ids = torch.tensor(row.tree.ids)
        made["prompt_ids"][i, before - f:], made["prompt_mask"][i, before - f:] = ids[:f], 1
        made["completion_ids"][i, :len(ids) - f], made["completion_mask"][i, :len(ids) - f] = ids[f:], 1
        for span in row.tree.spans:
            made["tool_mask"][i, span.start - f:span.end - f] = 1
    advantages = torch.tensor([1.0 if i % 2 else -1.0 for i in range(len(rows))])
    return made | {"advantages": advantages, "num_items_in_batch": made["tool_mask"].sum().float(), "composer_rows": rows}


def expected(job: Job, dealt: list[dict]) -> list[int]:
    "Idle passes of each rank as the simulation counts them."
    import simulate

    from composer_replication.contrib.fsdp.deal import branch_tokens, deal
    from composer_replication.contrib.fsdp.level import level
    from composer_replication.tree.pack import pack_trees
    rows, how = rows_of(dealt, job), simulate.READINGS["as shipped"]
    hands, passes = deal([(*branch_tokens(r.tree), len(r.tree.ids)) for r in rows], job.ranks), []
    for hand in hands:
        trees = [rows[row].tree for row in hand]
        first = [t.spans[0].start for t in trees]
        width = max(first) + max(len(t.ids) - f for t, f in zip(trees, first))
        batch = pack_trees(trees, 0, [max(first) - f for f in first], width)
        passes.append([simulate.held(batch, how).passes])
    return [sum(each.idle(kind) for kind in simulate.KINDS) for each, in level(passes)]


# ---- one rank

class Meter:
    "CPU seconds, bytes that this process writes to sockets, collectives, passes."

    def __init__(self):
        import torch
        import torch.distributed as dist

        import composer_replication.contrib.fsdp.trainer as trainer
        self.counts, self.steps = Counter(), []
        for name in ("all_gather_single", "reduce_scatter_single"):
            setattr(dist, name, self.around(name, getattr(dist, name)))
        idle = trainer.idle_pass

        def counted(model):
            start = time.process_time()
            value = idle(model)
            self.counts["idle"] += 1
            self.counts["idle without gradient"] += not torch.is_grad_enabled()
            self.counts["idle_cpu_s"] += time.process_time() - start
            return value

        trainer.idle_pass = counted

    def around(self, name, inner):
        def counted(*args, **kwargs):
            at, key = (0, "output") if name.startswith("all_gather") else (1, "input")  # what holds the whole
            whole = args[at] if len(args) > at else kwargs.get(key, kwargs.get(f"{key}_tensor"))
            self.counts[name] += 1
            self.counts[f"{name} bytes"] += whole.numel() * whole.element_size()
            return inner(*args, **kwargs)

        return counted

    def state(self):
        written = next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("wchar"))
        return Counter(cpu_s=time.process_time(), wall_s=time.perf_counter(), written=written) + Counter(self.counts)


def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))


def held_bytes(trainer):
    "What this rank keeps between steps, by kind: tensors that are there."
    from torch.distributed.tensor import DTensor
    local = lambda t: t.to_local() if isinstance(t, DTensor) else t
    size = lambda tensors: sum(local(t).numel() * t.element_size() for t in tensors)
    parameters = list(trainer.model.parameters())
    moments = [v for state in trainer.optimizer.state.values() for v in state.values() if getattr(v, "ndim", 0)]
    teacher = trainer.teacher
    kept = []
    if teacher is not None:
        own = getattr(teacher, "_kept", None)
        clone = getattr(teacher, "clone", None)
        kept = list(clone.parameters()) if clone is not None else list(own.values()) if own else []
    return {"weights": size(parameters), "gradients": size(parameters), "optimizer": size(moments), "teacher": size(kept)}


def cloned_teacher():
    "A teacher that is a second sharded model, in place of swapped shards."
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from composer_replication.contrib.fsdp.policies import ShardedPolicy, _cloned_head, evaluating, within_root
    from composer_replication.training.teacher import clone_policy

    class ClonedPolicy(ShardedPolicy):
        def __init__(self, kind, root, rate, mix, start=None):
            super().__init__(kind, root, rate, mix, start)
            self.clone = clone_policy(root, share=False)

        def begin(self):
            if not self._kept:
                mesh = next(p for p in self._model.parameters() if isinstance(p, DTensor)).device_mesh
                for layer in self.clone.model.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.clone, mesh=mesh)
                self._kept["begun"] = torch.zeros(0)

        def read(self, function):
            self.begin()
            results = []
            with evaluating((self.clone,)), torch.no_grad():
                within_root(self.clone, lambda: results.append(function(self.clone)))
            return results

        def states(self, function):
            (hidden, head), = self.read(lambda model: (function(model), _cloned_head(model)))
            return None if hidden is None else (hidden, head)

    return ClonedPolicy


def run_job(job: Job, out: Path, dealt: list[dict], meter: Meter):
    "One rank's steps; what they took goes to a file."
    import sharded_script
    import torch
    import world
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

    import composer_replication.contrib.fsdp.policies as sharded
    from composer_replication.contrib.fsdp.trainer import ShardedTrainer
    from composer_replication.hints.layers import default_composite
    from composer_replication.replay.pairs import group_pairs
    from composer_replication.training.config import ComposerReplicationConfig
    rank = int(os.environ.get("RANK", 0))
    tokenizer, rows = world.tokenizer(), rows_of(dealt, job)
    per = len(rows) // job.ranks
    mine = batch_of(rows[rank * per:(rank + 1) * per], tokenizer.pad_token_id)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()

    class Stored(ShardedTrainer):
        make_teacher = staticmethod(cloned_teacher() if job.clone else sharded.sharded_teacher)

        def _generate_and_score_completions(self, inputs):
            again = lambda v: torch.cat([v] * job.accumulation) if isinstance(v, torch.Tensor) and v.ndim else v
            return {k: v * job.accumulation if isinstance(v, list) else again(v) for k, v in mine.items()}

    meter.steps, begun = [], status("VmRSS")

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            Path("/proc/self/clear_refs").write_text("5")
            self.before, self.rss = meter.state(), status("VmRSS")

        def on_step_end(self, args, state, control, **kwargs):
            after = meter.state()
            memory = {"peak": status("VmHWM") - begun, "before": self.rss - begun}
            meter.steps.append({k: after[k] - self.before[k] for k in after} | memory)

    channels = dict(alpha_sdpo=float(job.channels), beta_replay=0.5 * job.channels, teacher=job.teacher)
    config = ComposerReplicationConfig(
        str(out / f"run-{rank}"), report_to="none", bf16=False, use_cpu=True, gradient_checkpointing=job.checkpointing,
        save_strategy="no", logging_steps=1, max_steps=STEPS + WARM, learning_rate=1e-4, per_device_train_batch_size=per,
        gradient_accumulation_steps=job.accumulation, steps_per_generation=job.accumulation, num_generations=2,
        max_turns=3, max_completion_length=64, teacher_check="off", disable_tqdm=True, **channels,
        **(deepcopy(sharded_script.FSDP) if job.sharded else {}))
    extra = {"hint_source": default_composite(), "pair_source": group_pairs} if job.channels else {}
    trainer = Stored(model, None, config, Dataset.from_list(world.rows(8)), processing_class=tokenizer,
                     environment_factory=world.Files, callbacks=[Watch()], **extra)
    gc.collect()
    trainer.train()
    found = {"steps": meter.steps, "held": held_bytes(trainer), "parameters": sum(p.numel() for p in trainer.model.parameters()),
             "log": [e for e in trainer.state.log_history if "loss" in e][-1]}
    (out / f"{rank}.json").write_text(json.dumps(found, default=float))


def run_rank(given: Path):
    "One rank of all jobs with as many ranks, one after another."
    import sharded_script
    import torch
    import torch.distributed as dist
    plan = json.loads((given / "plan.json").read_text())
    torch.set_num_threads(1)
    sharded_script.let_accelerate_shard_on_cpu()
    dist.init_process_group("gloo")
    meter = Meter()
    for number, job in enumerate(plan["jobs"]):
        out = given / str(number)
        out.mkdir(exist_ok=True)
        run_job(Job(**job), out, plan["rows"], meter)
        print(job["name"], time.process_time(), flush=True)
    dist.destroy_process_group()


# ---- all jobs

def run_jobs(some: list[Job], dealt: list[dict]) -> list[dict]:
    "What the ranks of jobs with equally many ranks left behind; those from one that fails or takes too long on are absent."
    count = some[0].ranks
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        (Path(folder) / "plan.json").write_text(json.dumps({"jobs": [vars(job) for job in some], "rows": dealt}))
        ranks = []
        for rank in range(count):
            env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "RANK": str(rank),
                   "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": port}
            with open(Path(folder) / f"{rank}.log", "w") as log:
                ranks.append(subprocess.Popen([sys.executable, __file__, "--rank", folder], env=env, stdout=log, stderr=log))
        end = time.monotonic() + LIMIT * len(some)
        try:
            while any(r.poll() is None for r in ranks) and not any(r.poll() for r in ranks) and time.monotonic() < end:
                time.sleep(0.2)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(rank.returncode for rank in ranks):
            print("".join((Path(folder) / f"{r}.log").read_text()[-2500:] for r in range(count)), file=sys.stderr)
        files = [[Path(folder) / str(n) / f"{r}.json" for r in range(count)] for n in range(len(some))]
        ended = [(job, each) for job, each in zip(some, files) if all(f.exists() for f in each)]
        return [vars(job) | {"found": [json.loads(file.read_text()) for file in each]} for job, each in ended]


def main(argv=None):
    parser = argparse.ArgumentParser(description="Measure spike 201.")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", help="part of a job's name")
    asked = parser.parse_args(argv)
    if asked.rank:
        return run_rank(asked.rank)
    path = HERE / "measured.json"
    before = json.loads(path.read_text()) if path.exists() and asked.only else {"jobs": []}
    kept, dealt = {job["name"]: job for job in before["jobs"]}, before.get("rows") or real_rows(Path(os.environ["COMPOSER_DATA"]))
    for count in (1, 2, 4):
        # unsharded ones first: accelerate leaves in the environment that weights are sharded
        wanted = [job for job in jobs() if job.ranks == count and (not asked.only or asked.only in job.name)]
        some = sorted(wanted, key=lambda job: job.sharded)
        for made in run_jobs(some, dealt) if some else ():
            kept[made["name"]] = made
            print(made["name"], {k: round(v, 3) for k, v in made["found"][0]["steps"][-1].items()}, flush=True)
        path.write_text(json.dumps({"jobs": list(kept.values()), "rows": dealt}) + "\n")


if __name__ == "__main__":
    main()
