"""The panel of spike 111: `python panel.py` goes on with the arms in their order; after each one it writes `runs.json.gz`.

    python panel.py                 tune and run the arms
    python panel.py --estimators    E8: log-probabilities of policies at known distances, into `estimators.json.gz`
    python panel.py --teachers      E10: how often each kind of hint leads to the right action, into `teachers.json`

Resumable: the folder `runs` keeps what has ended and the last saved step of the rest."""
import argparse
import gzip
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import torch

from composer_replication.envs.toy.env import WorldEnv, world_rows
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.teams import TeamEnv, team_hints
from composer_replication.experiments.setting import Setting
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.types import RolloutConfig

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from hint_gate import hinted_turns, right_actions, shared_turns  # noqa: E402
from tuned_arms import SEEDS, area, played  # noqa: E402

# A2 of spike 106, and one thing changed in every other arm.
A2 = Setting(habit="teams", turns=3, hints="exact", alpha_sdpo=10.0, sdpo_beta=0.0, steps=30, measure_every=5, tasks=16,
             rollouts=4, held_out=64, held_out_series="panel")
A1 = replace(A2, alpha_sdpo=0.0, hints="template")
A3 = replace(A1, beta_replay=0.01, replay_dpo_beta=0.5)
ARMS = {
    "A2": A2,
    "live": replace(A2, teacher="live"),
    "all turns": replace(A2, target_turns="all"),
    "raw": replace(A2, hints="raw"),
    "blind": replace(A2, hints="blind"),
    "filler": replace(A2, hints="filler"),
    "wrong": replace(A2, hints="wrong"),
    "A1": A1,
    "start": replace(A2, hint_placement="start"),
    "own": replace(A2, hints="own"),
    "trust region": replace(A2, teacher="trust_region"),
    "A3": A3,
    "A3, ten times beta": replace(A3, beta_replay=0.1),
    "off policy": replace(A2, iterations=2),
    "off policy, unclipped": replace(A2, iterations=2, importance_clip=None),
    "A5": replace(A2, sdpo_steps=A2.steps // 2, policy_start=A2.steps // 2),
    "A6": replace(A2, all_fail="distil")}
KNOWN = {"A1": 3e-4, "A2": 1e-3, "filler": 1e-4, "wrong": 1e-4}  # tuned in spike 106, on development tasks
RATES, TUNING = (1e-4, 3e-4, 1e-3), (100, 101)
KINDS = ("exact", "blind", "raw", "filler", "wrong")  # of E10
SHARES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # of the way from a base agent to a teacher of the same trunk
TASKS = 96  # of E8 and E10


def tune(arm: str, workers: int) -> dict[str, float]:
    "Learning rate -> mean area on development tasks."
    grid = {str(rate): replace(ARMS[arm], learning_rate=rate, held_out_split="dev") for rate in RATES}
    results = played(grid, TUNING, workers, HERE / "runs")
    return {rate: fmean(area(r.curve) for r in of.values()) for rate, of in results.items()}


def panel(workers: int) -> None:
    "Every arm in its order: its learning rate, its runs."
    file = HERE / "runs.json.gz"
    kept = json.loads(gzip.decompress(file.read_bytes())) if file.exists() else {"tuning": {}, "rates": {}, "runs": []}
    for arm, setting in ARMS.items():
        if arm in kept["rates"]:
            continue
        areas = {} if arm in KNOWN else tune(arm, workers)
        rate = KNOWN.get(arm) or float(max(areas, key=areas.get))
        runs = played({arm: replace(setting, learning_rate=rate)}, SEEDS, workers, HERE / "runs")[arm]
        kept["tuning"] |= {arm: areas} if areas else {}
        kept["rates"][arm] = rate
        kept["runs"] += [{"arm": arm, **asdict(run)} for run in runs.values()]
        file.write_bytes(gzip.compress(json.dumps(kept).encode(), mtime=0))


def teachers() -> None:
    "By kind of hint, whether the base agent that reads it acts rightly at each error turn of development tasks."
    policy = TransformersPolicy(embedded_model("teams").eval(), embedded_tokenizer())
    rows = world_rows(TASKS, "panel-teachers", "dev")
    rollouts = collect(policy, TeamEnv, rows, RolloutConfig(max_turns=3, max_turn_tokens=128), 0)
    shared = shared_turns({kind: hinted_turns(rollouts, policy, team_hints(kind)) for kind in KINDS})
    right = {kind: right_actions(policy, turns, True, TeamEnv) for kind, turns in shared.items()}
    none = right_actions(policy, shared["exact"], False, TeamEnv)
    found = {"problems": [t.problem for t in shared["exact"]], "none": none} | right
    (HERE / "teachers.json").write_text(json.dumps(found) + "\n")


def moved(share: float) -> torch.nn.Module:
    "The strong base with its weights moved towards a teacher's."
    model, towards = embedded_model("strong").eval(), embedded_model("teacher-1").state_dict()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight.lerp_(towards[name], share)
    return model


def logprobs(model: torch.nn.Module, rollout) -> list[float]:
    "Of the tokens that the policy sampled in a rollout."
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    with torch.no_grad():
        every = model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1:-1].log_softmax(-1)
    taken = every.gather(-1, ids[0, len(rollout.prompt_ids):, None])[:, 0]
    return [round(value, 5) for value in taken[torch.tensor(rollout.completion_mask).bool()].tolist()]


def estimators() -> None:
    "By distance, for each rollout the log-probabilities of its tokens under the policy that sampled them and under the start."
    start, tokenizer, made = embedded_model("strong").eval(), embedded_tokenizer(), {}
    rows = world_rows(TASKS, "panel-kl", "dev")
    for share in SHARES:
        policy = moved(share)
        found = collect(TransformersPolicy(policy, tokenizer), WorldEnv, rows, RolloutConfig(max_turns=8, max_turn_tokens=96), 0)
        made[str(share)] = [[logprobs(policy, r), logprobs(start, r)] for r in found if any(r.completion_mask)]
    (HERE / "estimators.json.gz").write_bytes(gzip.compress(json.dumps(made).encode(), mtime=0))


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--workers", type=int, default=2)
    given.add_argument("--estimators", action="store_true")
    given.add_argument("--teachers", action="store_true")
    given = given.parse_args()
    estimators() if given.estimators else teachers() if given.teachers else panel(given.workers)


if __name__ == "__main__":
    main()
