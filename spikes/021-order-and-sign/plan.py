"""Spike 021: order and sign, in the lab's two worlds; the second stage of spike 018. Go on with the plan's runs.

    OMP_NUM_THREADS=1 .venv/bin/python spikes/021-order-and-sign/plan.py --minutes 30 --workers 1

Each run that ends is appended to `runs.jsonl`, at once; a run that was killed is made again. No run begins after so many minutes.
021-order-and-sign.ipynb states hypotheses, thresholds and the verdict rule; they were committed before any run.
"""
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, TrainerCallback

from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.experiments.arm import arm_config, world_of
from composer_replication.experiments.evaluate import episode_limits
from composer_replication.experiments.right_actions import FailedTurn, hinted_turns, right_actions
from composer_replication.experiments.setting import Setting
from composer_replication.losses.channels import at, teacher_states
from composer_replication.losses.chunked import lm_head, token_logprobs
from composer_replication.losses.divergences import Divergence
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.types import Rollout
from composer_replication.training.trainer import ComposerReplicationTrainer
from composer_replication.tree.build import Tree, build_tree
from composer_replication.tree.example import target_hints, target_turns
from composer_replication.tree.forward import forward_trunk
from composer_replication.tree.pack import pack_trees

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import appended  # noqa: E402
from fingerprint import reward_fingerprint  # noqa: E402

KEPT = HERE / "runs.jsonl"
WORLDS = ("teams", "strong")  # base agents; each acts in its own world
SEEDS, DESCRIBED, TUNING = tuple(range(40, 60)), tuple(range(40, 50)), (100, 101)
PRIMARY = {"teams": ("recorded exact", "contrastive"), "strong": ("policy", "order")}  # arms with every seed
ARMS = ("recorded exact", "contrastive", "policy", "order", "joint, gated", "size only")
STEPS = 100  # of `recorded exact`; every other arm ends when it has cost as much
EPISODES, TREES, TURNS = 192, 16, 3  # recorded episodes, trees of a step, turns of an episode
BLOCK, LEAST_GAIN, LEAST_SHARE = 10, 0.02, 0.8  # of `order`: steps between looks; progress; share of the teacher's success
HELD_OUT = {"dev": 64, "test": 128}  # tasks measured after a run, one episode each
RATES = (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
FIRST = (2, 3, 4)  # of RATES, for every arm alike; wider where the best is an edge


@dataclass(frozen=True)
class Run:
    "One run of the plan."

    world: str
    arm: str
    seed: int
    rate: float
    then: float | None = None  # learning rate of the policy objective behind it, in `order`

    @property
    def split(self) -> str:
        return "dev" if self.seed in TUNING else "test"

    @property
    def name(self) -> str:
        return f"{self.world}-{self.arm}-{self.seed}-{self.rate:.2e}"


# --- what is run

def tuned(world: str, arm: str, done: dict[str, dict]) -> tuple[list[Run], float | None]:
    "Development runs of an arm so far needed, and its rate once they have ended."
    run_of, level = (lambda seed, rate: Run(world, arm, seed, rate)), (lambda run: fmean(run["passed"]))
    return appended.tuned(run_of, level, done, RATES, FIRST, TUNING)


def of_arm(world: str, arm: str, done: dict[str, dict], seeds: tuple[int, ...]) -> Iterator[Run | None]:
    "Development runs of an arm, then those on test tasks; None stands for runs that wait for a choice."
    needed = ("recorded exact", "policy") if arm == "order" else (arm,)  # `order` has the rates of the two that it is made of
    found = [tuned(world, one, done) for one in needed]
    for runs, _ in found:
        yield from runs
    rates = [rate for _, rate in found]
    yield from (Run(world, arm, seed, *rates) if all(rates) else None for seed in seeds)


def plan(done: dict[str, dict]) -> Iterator[Run | None]:
    "Runs in order: those of the primary contrasts, then the described ones."
    for world in WORLDS:
        for arm in PRIMARY[world]:
            yield from of_arm(world, arm, done, SEEDS)
    for world in WORLDS:
        for arm in ARMS:
            if arm not in PRIMARY[world]:
                yield from of_arm(world, arm, done, DESCRIBED)


# --- how a run is made

@cache
def tokenizer():
    return embedded_tokenizer()


def policy_of(model: PreTrainedModel) -> TransformersPolicy:
    return TransformersPolicy(model.eval(), tokenizer())


def setting_of(world: str, **options) -> Setting:
    return Setting(habit=world, turns=TURNS, hints="exact", tasks=16, rollouts=4, measure_every=1000, steps=1000, **options)


class Clock:
    """What playing and training have cost, in steps of `recorded exact`; measuring is left out.

    The price of each part was measured once, side by side (`costs.py`): on a busy machine a run does the same."""

    def __init__(self, world: str):
        self.price, self.spent = json.loads((HERE / "costs.json").read_text())[world], 0.0

    def pay(self, part: str) -> None:
        self.spent += self.price[part]

    @property
    def over(self) -> bool:
        return self.spent >= self.price["playing"] + STEPS - 0.001


class Work:
    "One run: its world, its tasks and its start."

    def __init__(self, run: Run, clock: Clock):
        self.run, self.clock, self.world = run, clock, world_of(setting_of(run.world))
        self.start = embedded_model(run.world).eval()

    def rows(self, n: int, split: str) -> list[dict]:
        return self.world.rows(n, f"order-and-sign-{self.run.seed}", split)

    def play(self, model: PreTrainedModel, rows: list[dict], seed: int) -> list[Rollout]:
        return collect(policy_of(model), self.world.environment, rows, episode_limits(TURNS, seed), seed)

    def right(self, model: PreTrainedModel, turns: list[FailedTurn], hinted: bool = False) -> list[bool]:
        return right_actions(policy_of(model), turns, hinted, self.world.environment)

    def failed_turns(self, split: str) -> list[FailedTurn]:
        "Failed turns of the start on held-out tasks."
        played = self.play(self.start, self.rows(HELD_OUT[split], split), 0)
        return hinted_turns(played, policy_of(self.start), self.world.hints("exact"))

    def measured(self, model: PreTrainedModel) -> dict:
        "Whether new episodes pass, and the start's; on test tasks also whether new actions at the start's failed turns work."
        rows = self.rows(HELD_OUT[self.run.split], self.run.split)
        models = {"passed": model, "start": self.start}
        found = {name: [int(r.reward == 1.0) for r in self.play(one, rows, 0)] for name, one in models.items()}
        if self.run.split == "test":
            found["right"] = [int(x) for x in self.right(model, self.failed_turns("test"))]
        return found

    def made(self) -> dict:
        "All that is kept of the run."
        make = {"recorded exact": self.recorded, "contrastive": self.recorded, "order": self.order}.get(self.run.arm, self.live)
        model, found = make()
        return found | {"spent": round(self.clock.spent, 2)} | self.measured(model)

    # ---- SDPO on recorded episodes

    def trees(self, played: list[Rollout]) -> list[tuple[Tree, Tree]]:
        "Of each episode with failed turns that have both hints: its tree with exact hints, and with fillers."
        chat, trees = policy_of(self.start).chat, []
        for r in played:
            targets = target_turns(r.trace)
            exact, filler = (dict(target_hints(r.trace, targets, self.world.hints(kind))) for kind in ("exact", "filler"))
            shared = [turn for turn in targets if exact[turn] and filler[turn]]
            if shared:
                sampled = ((*r.prompt_ids, *r.completion_ids), [0] * len(r.prompt_ids) + list(r.completion_mask))
                trees.append(tuple(build_tree(r.trace, chat, [(turn, hints[turn]) for turn in shared], sampled=sampled)
                                   for hints in (exact, filler)))
        return trees

    def steps(self, model: PreTrainedModel) -> Iterator[int]:
        "Optimizer steps of SDPO on the start's recorded episodes, numbered from 1."
        trees = self.trees(self.play(self.start, self.rows(EPISODES, "train"), self.run.seed))
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.run.rate, weight_decay=0)
        order, generator, step = [], torch.Generator().manual_seed(self.run.seed), 0
        self.clock.pay("playing")
        while not self.clock.over:
            if len(order) < TREES:
                order += torch.randperm(len(trees), generator=generator).tolist()
            exact, filler = (pack_trees([trees[i][kind] for i in order[:TREES]], tokenizer().pad_token_id) for kind in (0, 1))
            loss = sdpo_loss(model.train(), self.start, exact, filler if self.run.arm == "contrastive" else None)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            order, step = order[TREES:], step + 1
            self.clock.pay("contrastive" if self.run.arm == "contrastive" else "recorded exact")
            yield step

    def recorded(self) -> tuple[PreTrainedModel, dict]:
        "SDPO alone on the start's recorded episodes."
        model = embedded_model(self.run.world)
        return model, {"steps": max(self.steps(model), default=0)}

    # ---- the policy objective

    def live(self) -> tuple[PreTrainedModel, dict]:
        "Dr.GRPO in groups of four on sixteen tasks a step, with channel 2 beside it or as its weights."
        return self.train(embedded_model(self.run.world), self.run.rate)

    def train(self, model: PreTrainedModel, rate: float) -> tuple[PreTrainedModel, dict]:
        joint = self.run.arm == "joint, gated"
        how = {"alpha_sdpo": 1.0, "teacher": "frozen", "sdpo_beta": 0.0, "all_fail": "distil"} if joint else {}
        with tempfile.TemporaryDirectory() as folder:
            config = arm_config(setting_of(self.run.world, learning_rate=rate, **how), self.run.seed, Path(folder))
            kind, ends = Sized if self.run.arm == "size only" else ComposerReplicationTrainer, Ends(self)
            trainer = kind(model, None, config, Dataset.from_list(self.rows(200 * 16, "train")), processing_class=tokenizer(),
                           environment_factory=self.world.environment, callbacks=[ends],
                           hint_source=self.world.hints("exact") if joint else None)
            if kind is Sized:
                trainer.work = self
            for printing in (PrinterCallback, ProgressCallback):
                trainer.remove_callback(printing)
            trainer.train()
            return trainer.student, {"steps": trainer.state.global_step, "rewards": ends.rewards}

    def order(self) -> tuple[PreTrainedModel, dict]:
        "SDPO on recorded episodes until it has taught what it can, then the policy objective; looking costs, too."
        model = embedded_model(self.run.world)
        turns = self.failed_turns("dev")
        taught = [n for n, right in enumerate(self.right(self.start, turns, hinted=True)) if right]
        before, step, looks = fmean(self.right(self.start, turns)), 0, []
        self.clock.pay("first look")
        for step in self.steps(model):
            if step % BLOCK == 0:
                now = self.right(model, turns)
                self.clock.pay("look")
                share = fmean(now[n] for n in taught) if taught else 1.0
                looks.append([step, fmean(now), share])
                if fmean(now) - before < LEAST_GAIN and share >= LEAST_SHARE:
                    break
                before = fmean(now)
        found = {"switched": None if self.clock.over else step, "looks": looks, "sdpo_steps": step}
        if self.clock.over:
            return model, found | {"steps": 0}
        model, after = self.train(model.train(), self.run.then)
        return model, found | after


def sdpo_loss(model: PreTrainedModel, teacher: PreTrainedModel, exact, filler=None) -> torch.Tensor:
    """The mean forward KL, in nats a token, to the teacher behind exact hints; with `filler` its logits are contrastive.

    They are then plain + (exact - filler): what a filler shifts as well is taken off (2606.11709)."""
    logits = lambda reader, states: lm_head(reader).logits(states)
    with torch.no_grad():
        target = logits(teacher, teacher_states(teacher, exact)).log_softmax(-1)
        if filler is not None:
            plain = logits(teacher, at(forward_trunk(teacher, exact)[0], exact.sdpo_student)).log_softmax(-1)
            target = plain + target - logits(teacher, teacher_states(teacher, filler)).log_softmax(-1)
    student = logits(model, at(forward_trunk(model, exact)[0], exact.sdpo_student))
    return Divergence(0.0)(student, target).mean()


class Ends(TrainerCallback):
    "Ends a training with the clock, and keeps the rewards of its steps."

    def __init__(self, work: Work):
        self.clock, self.rewards = work.clock, []
        self.part = "policy" if work.run.arm == "order" else work.run.arm

    def on_step_end(self, args, state, control, **kwargs):
        self.clock.pay(self.part)
        control.should_training_stop = self.clock.over

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rewards += [logs["reward"]] if "reward" in (logs or {}) else []


class Sized(ComposerReplicationTrainer):
    "At hinted turns a token's advantage is weighted by how far the hint moves its log-probability; the reward keeps its sign."

    work: Work

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            weights = self.work_weights(output["completion_ids"].shape)
            output["advantages"] = output["advantages"][:, None] * weights.to(output["advantages"])
        return output

    def work_weights(self, shape) -> torch.Tensor:
        "(rows, tokens): 1 beside hinted turns; at them the gap, divided by the mean gap of all such tokens."
        weights, gaps = torch.ones(shape), torch.zeros(shape, dtype=torch.bool)
        start, chat = self.work.start, policy_of(self.work.start).chat
        for row, r in enumerate(self.rollouts):
            targets = target_turns(r.trace)
            hints = [(turn, hint) for turn, hint in target_hints(r.trace, targets, self.work.world.hints("exact")) if hint]
            if hints:
                batch = pack_trees([build_tree(r.trace, chat, hints, sampled=r.segments[0].row)], tokenizer().pad_token_id)
                with torch.no_grad():
                    states = teacher_states(start, batch), at(forward_trunk(start, batch)[0], batch.sdpo_student)
                    hinted, plain = (token_logprobs(s, lm_head(start), batch.sdpo_labels) for s in states)
                places = batch.sdpo_student[:, 1] + 1 - len(r.prompt_ids)
                weights[row, places], gaps[row, places] = (hinted - plain).abs(), True
        if gaps.any():
            weights[gaps] /= weights[gaps].mean().clamp_min(1e-6)
        return weights


def make(run: Run) -> dict:
    "Make a run."
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    world = "teams" if run.world == "teams" else "toy"
    return asdict(run) | {"split": run.split, "fingerprint": reward_fingerprint(world)} | Work(run, Clock(run.world)).made()


if __name__ == "__main__":
    appended.command("021", KEPT, plan, make)
