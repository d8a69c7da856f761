"What the stages of spike 200 share: options, what the machine lacks, and results.json."
import argparse
import json
import os
import platform
import shutil
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "spikes")]  # the package travels as source; it is not installed there
STAGES = {"a": "tests marked cuda", "b": "cost and memory of the channels", "c": "runs of spike 012: H2, H1, H4", "d": "vLLM"}
# what the stages do not import; torch comes with the machine
UNUSED = {"torch", "ipywidgets", "matplotlib", "starlette", "uvicorn"}


class Stage:
    "One stage of the programme: its options, its clock, and its entry in results.json."

    def __init__(self, letter: str, description: str, needs: tuple[str, ...] = ()):
        self.letter, self.start = letter, time.monotonic()
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--out", type=Path, help="folder of results.json; else out/200-gpu, with --tiny out/200-gpu-tiny")
        parser.add_argument("--tiny", action="store_true", help="on the CPU, in under a minute: does the script run?")
        parser.add_argument("--seconds", type=float, default=450, help="nothing new begins when the next may not end by then")
        parser.add_argument("--together", type=int, default=1, help="runs beside one another, of stage c; their memory adds up")
        parser.add_argument("--model", default=None, help="folder of a model, for stage d")
        parser.add_argument("--commit", default="", help="of the tree that is measured; numbers of others are measured anew")
        self.given, self.needs = parser.parse_args(), needs
        self.tiny, self.device = self.given.tiny, "cpu" if self.given.tiny else "cuda"
        self.out = self.given.out or ROOT / "out" / f"200-gpu{'-tiny' * self.tiny}"
        self.longest = 0.0

    def check(self) -> None:
        "End with one sentence where this machine cannot run the stage."
        if self.tiny and any(stage.get("facts") for stage in stages_of(self.out / "results.json", tiny=False).values()):
            sys.exit(f"stage {self.letter}: {self.out} holds stages that were not run with --tiny; give another --out")
        why = missing(self.needs, gpu=not self.tiny)
        if why:
            self.write({}, {}, reason=why)
            sys.exit(f"stage {self.letter}: {why}")

    def seconds(self) -> float:
        "Since the stage began."
        return time.monotonic() - self.start

    def fits(self) -> bool:
        "Whether one more piece as long as the longest so far ends in time."
        return self.seconds() + 1.3 * self.longest < self.given.seconds

    def took(self, begun: float) -> None:
        "A piece of work ended that began then."
        self.longest = max(self.longest, time.monotonic() - begun)

    def stamp(self) -> dict:
        "What made a number."
        found = machine()
        return {"card": found.get("gpu"), "commit": self.given.commit} | {name: found[name] for name in ("torch", "transformers")}

    def done(self, row: dict | None) -> bool:
        "Whether a number is there that this commit made."
        return bool(row) and row.get("commit", "") == self.given.commit

    def send(self, path: Path) -> None:
        "Copy a file to where the device tool takes files from, if it runs this."
        if os.environ.get("OUT") and not self.tiny:
            shutil.copy(path, os.environ["OUT"])

    def earlier(self) -> dict:
        "This stage's facts of an earlier call: in --out, else in the spike's results.json."
        return load(self.out, self.tiny).get(self.letter, {}).get("facts", {})

    def write(self, checks: dict[str, bool], facts: dict, reason: str | None = None) -> None:
        "Put this stage into results.json, but without facts over none that has some; `reason`: why it did not run to its end."
        stages = load(self.out, self.tiny)
        new = {
            "title": STAGES[self.letter], "verdict": judge(checks) if reason is None else "NOT RUN", "reason": reason,
            "checks": checks, "facts": facts, "tiny": self.tiny, "seconds": round(self.seconds(), 1), "machine": machine()}
        if facts or not stages.get(self.letter, {}).get("facts"):
            stages[self.letter] = new
        self.out.mkdir(parents=True, exist_ok=True)
        partial = self.out / "results.json.partial"
        partial.write_text(json.dumps(summary(stages), indent=1))
        os.replace(partial, self.out / "results.json")
        self.send(self.out / "results.json")
        why = f" ({reason})" if reason else ""
        print(f"stage {self.letter}: {new['verdict']}{why}, {self.seconds():.0f} s", flush=True)


def missing(needs: tuple[str, ...], gpu: bool) -> str | None:
    "What this machine lacks, in one sentence; None where all is here. Imports nothing before the packages are looked for."
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    from packaging.requirements import Requirement
    wanted = [r for r in map(Requirement, lines) if r.name not in UNUSED] + [Requirement(name) for name in ("torch", *needs)]
    absent = [str(r) for r in wanted if not here(r)]
    if absent:
        return f"this python lacks {', '.join(absent)}; carry the wheels of spikes/200-gpu/wheels.txt there"
    import torch
    return None if torch.cuda.is_available() or not gpu else "torch finds no CUDA device; take a machine with a GPU, or --tiny"


def here(requirement) -> bool:
    "Whether a package is installed in a version that will do."
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def load(out: Path, tiny: bool) -> dict:
    "The stages of earlier calls: those in `out`, and on a real run those that the spike keeps."
    paths = [out / "results.json"] + ([] if tiny else [HERE / "results.json"])
    return next(filter(None, (stages_of(path, tiny) for path in paths)), {})


def stages_of(path: Path, tiny: bool) -> dict:
    "The stages of one file that were run with --tiny, or those that were not; none where there is no file."
    stages = json.loads(path.read_text()).get("stages", {}) if path.is_file() else {}
    return {letter: stage for letter, stage in stages.items() if stage.get("tiny") == tiny}


def judge(checks: dict[str, bool]) -> str:
    "A verdict over all checks."
    return "VALIDATED" if checks and all(checks.values()) else "REFUTED"


def summary(stages: dict) -> dict:
    "results.json: one verdict over the stages, a bare word, and beside it why it is not more."
    ran = {letter: stage["verdict"] for letter, stage in stages.items() if not stage["tiny"] and stage["verdict"] != "NOT RUN"}
    if not ran:
        reasons = [f"stage {k}: {s['reason'] or 'tiny, on the CPU'}" for k, s in sorted(stages.items())]
        return {"verdict": "NOT RUN", "reason": "; ".join(reasons) or "no GPU was at hand", "stages": stages}
    left = [f"stage {k} was not run" for k in STAGES if k not in ran]
    one = "REFUTED" if "REFUTED" in ran.values() else "UNDECIDED" if left else "VALIDATED"
    return {"verdict": one, "reason": "; ".join(left) or None, "stages": stages}


def machine() -> dict:
    "What it ran on."
    found = {"python": platform.python_version(), "processor": platform.machine(), "cores": os.cpu_count()}
    for name in ("torch", "transformers", "trl", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        found["gpu"] = sys.modules["torch"].cuda.get_device_name()
    return found
