"""Stage c: runs of spike 012 on one card, `--together` so many beside one another, in the order H2, H1, H4; a next call goes on.

What spike 012 keeps (runs.jsonl.gz) counts as done, rates and switch that were chosen on CPUs too. Each run that ends is in
results.json and runs.jsonl.gz at once; 012-order.ipynb reads the latter and decides.
"""
import shutil
import sys
import time
import traceback
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from common import ROOT, Stage

SPIKE = ROOT / "spikes" / "012-order"
CONTRASTS = {"H2": ("sequence", "policy"), "H1": ("sdpo", "filler"), "H4": ("joint, gated", "policy")}
# one development run of each arm that H2 needs, two steps each; the embedded model stands in for SmolLM2
TINY = dict(STEPS=2, TASKS=2, SAMPLES=1, SEEDS=(), TUNING=(1000,), SWITCH=(1,), CURVE=(), FIRST={"policy": (0,), "sdpo": (0,)})
SHORT = {"max_turns": 2, "max_turn_tokens": 24}


def spike012(folder: Path, tiny: bool):
    "Module `plan` of spike 012, which keeps its runs in this folder and makes its starts on this device."
    from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
    from composer_replication.recipes.recipe import load_recipe
    sys.path.append(str(SPIKE))
    plan = import_module("plan")
    plan.RUNS = folder

    def start(seed: int) -> Path:
        made = folder / f"start-{seed}"
        with plan.FileLock(f"{made}.making"):
            if tiny and not made.exists():
                embedded_model().float().save_pretrained(made)
                embedded_tokenizer().save_pretrained(made)
            elif not tiny:
                recipe = load_recipe("smollm2-sql", {"bf16": "true", "use_cpu": "false"})  # the recipe's own is for a CPU
                stage = recipe.arguments.warm_up | {"folder": str(made), "seed": seed}
                plan.warmed(plan.replace(recipe, arguments=plan.replace(recipe.arguments, warm_up=stage)))
        return made

    plan.start_folder = start
    if tiny:
        for name, value in TINY.items():
            setattr(plan, name, value)
        plan.LIMITS, train = plan.replace(plan.LIMITS, **SHORT, max_tokens=64), plan.Work.train
        plan.Work.train = lambda work, name, model, rate, steps, settings: train(work, name, model, rate, steps, settings | {
            key: str(value) for key, value in (SHORT | {"max_completion_length": 64}).items()})
        plan.plan = lambda: [*plan.rates("sdpo")[0], *plan.rates("policy")[0], *plan.switch()[0]]
    return plan


def order(plan) -> list:
    "The plan's runs whose settings are chosen, those that H2 needs first, then H1's, then H4's, without those that failed."
    def rank(run) -> int | None:
        if run.arm in ("policy", "sequence") or run.arm == "sdpo" and run.split == "development":
            return 0
        return {"sdpo": 1, "filler": 1, "gradients": 2, "joint, gated": 2}.get(run.arm)
    asked = dict.fromkeys(run for run in plan.plan() if run and rank(run) is not None)
    return sorted((run for run in asked if not run.path.with_suffix(".failed").exists()), key=rank)


def work(folder: Path, tiny: bool, commit: str) -> None:
    "Make runs until there is none that could begin; one that fails is written down and not tried again."
    import torch
    torch.set_num_threads(1)
    plan, device = spike012(folder, tiny), "cpu" if tiny else "cuda"
    name = "cpu" if tiny else torch.cuda.get_device_name()
    while True:
        run, lock, left = plan.resumable.claim(order(plan))
        if not left:
            return
        if run is None:  # others make what this plan waits for
            time.sleep(1)
            continue
        with lock:
            begun = time.monotonic()
            try:
                made = plan.Work(run, device).made()
            except Exception:
                run.path.with_suffix(".failed").write_text(traceback.format_exc())
                continue
            seconds = round(time.monotonic() - begun, 1)
            plan.write_json(run.path, plan.asdict(run) | {"commit": commit, "device": name, "seconds": seconds} | made)


def kept(plan, stage: Stage) -> tuple[dict[str, bool], dict]:
    "Checks and facts of the runs that ended, which are sent off as runs.jsonl.gz too; both empty where none ended."
    plan.resumable.collect(plan.RUNS, stage.out / "runs.jsonl.gz")
    stage.send(stage.out / "runs.jsonl.gz")
    runs = [plan.read(path) for path in sorted(plan.RUNS.glob("*.json"))]
    failed = {path.stem: path.read_text().splitlines()[-1] for path in sorted(plan.RUNS.glob("*.failed"))}
    facts = {"runs": [{key: run.get(key) for key in ("arm", "start", "seed", "device", "commit", "seconds")} |
                      {"passes": mean_of(run["rewards"])} for run in runs], "failed": failed}
    facts["points"] = {f"{name} from start {start}": points(runs, *arms, start)
                       for name, arms in CONTRASTS.items() for start in (0, 1)}
    checks = {"runs ended": bool(runs), "no run failed": not failed}
    if not stage.tiny:
        checks |= {f"{name}: ten seeds": len(found) >= 10 for name, found in facts["points"].items()}
    return (checks, facts) if runs or failed else ({}, {})


def mean_of(rewards: list[list[float]]) -> float:
    return sum(map(sum, rewards)) / sum(map(len, rewards))


def points(runs: list[dict], better: str, worse: str, start: int) -> dict[str, float]:
    "Difference of pass rates by seed, in points, of test runs that one device made: two devices begin at other weights."
    of = {(run["arm"], run["seed"], run["device"]): mean_of(run.get("equal", run)["rewards"])
          for run in runs if run["start"] == start and run["seed"] < 1000}
    return {f"{seed}, {device}": round(100 * (rate - of[worse, seed, device]), 2)
            for (arm, seed, device), rate in of.items() if arm == better and (worse, seed, device) in of}


def main() -> None:
    stage = Stage("c", __doc__)
    stage.check()
    folder = stage.out / "work" / "012"
    folder.mkdir(parents=True, exist_ok=True)
    plan = spike012(folder, stage.tiny)
    if not stage.tiny:
        plan.resumable.unpack(plan.HERE / "runs.jsonl.gz", plan.path_of)
    context, ended = get_context("spawn"), -1
    workers = [context.Process(target=work, args=(folder, stage.tiny, stage.given.commit)) for _ in range(stage.given.together)]
    for worker in workers:
        worker.start()
    try:
        while stage.seconds() < stage.given.seconds and any(worker.is_alive() for worker in workers):
            time.sleep(1)
            if (now := len([*folder.glob("*.json"), *folder.glob("*.failed")])) > ended:
                ended = now
                stage.write(*kept(plan, stage), reason=None if ended else "no run has ended yet")
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        for left in folder.glob("work-*"):  # of runs that were killed
            shutil.rmtree(left, ignore_errors=True)
    checks, facts = kept(plan, stage)
    stage.write(checks, facts, reason=None if facts else f"no run ended in {stage.seconds():.0f} s")


if __name__ == "__main__":
    main()
