"""`make road`: tasks, training with an interruption, evaluation, export, one answer over HTTP, on this machine."""
import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from composer_replication.core.files import write_json
from composer_replication.envs.deletion.task import read_tasks

COMMAND = Path(sys.executable).with_name("composer-rl")
LIMIT = 3600  # seconds for one stage
QUESTION = {"messages": [{"role": "user", "content": "Which files are there?"}], "max_tokens": 32, "seed": 0}


def ran(*words) -> str:
    "Standard output of a command that must succeed."
    return subprocess.run([COMMAND, *map(str, words)], check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT).stdout


def settings(model, tasks, run, steps) -> list[str]:
    "The shipped recipe for two cores, on these tasks, for a few steps."
    given = {"model": model, "tasks": tasks, "output_dir": run, "max_steps": steps, "held_out_rows": 2, "guard_steps": steps,
             "save_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_generations": 2,
             "max_completion_length": 512, "max_turns": 3, "max_turn_tokens": 64}
    return [word for key, value in given.items() for word in ("--set", f"{key}={value}")]


def interrupted(words) -> int:
    "Start a run, press Ctrl-C after its first step; the exit code."
    with subprocess.Popen([COMMAND, *words, "--json"], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if json.loads(line).get("step", 0) >= 1:
                process.send_signal(signal.SIGINT)
                break
        for _ in process.stdout:
            pass
        return process.wait(LIMIT)


def asked(model) -> str:
    "Serve a model, ask one question, stop."
    words = ["serve", "model", str(model), "--port", "0", "--name", "road", "--json"]
    with subprocess.Popen([COMMAND, *words], stdout=subprocess.PIPE, text=True) as server:
        try:
            address = json.loads(server.stdout.readline())["url"]
            request = urllib.request.Request(f"{address}/chat/completions", json.dumps(QUESTION | {"model": "road"}).encode(),
                                             {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=LIMIT) as answer:
                return json.load(answer)["choices"][0]["finish_reason"]
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)


def stages(package: str, model: str, folder: Path, steps: int):
    "Name and result of every stage, in order."
    tasks, run = folder / "tasks.jsonl", folder / "run"
    ran("tasks", "make", package, "--per-package", 8, "--minutes", 10, "--out", tasks)
    yield "tasks make", f"{sum(1 for _ in read_tasks(tasks))} tasks of {package}"
    words = ["train", "--config", "smollm2-larder", *settings(model, tasks, run, steps)]
    ran(*words, "--dry-run")
    yield "train --dry-run", "planned"
    code = interrupted(words)
    yield "train, Ctrl-C", f"exit code {code}"
    last = [json.loads(line) for line in ran(*words, "--set", "resume=true", "--json").splitlines()][-1]
    yield "train, resumed", f"step {last['step']} of {steps}"
    words = ["--task", "deletion", "--tasks", tasks, "--held-out", "--against", model, "--max-turns", 3, "--max-tokens", 2048]
    result = json.loads(ran("eval", run, *words, "--out", folder / "eval", "--json").splitlines()[-1])
    yield "eval --against", "pass@1 {estimate:+.2f} [{low:+.2f}, {high:+.2f}]".format(**result["differences"]["pass@1"])
    ran("export", run, "--merge", "--out", folder / "plain")
    yield "export", "logits equal"
    yield "serve model", f"one answer, {asked(folder / 'plain')}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", default="semver", help="a name on the package index, an sdist or a folder")
    parser.add_argument("--model", default="embedded", help="embedded, or the folder of `composer-rl models get smollm2`")
    parser.add_argument("--out", type=Path, default=Path("out/road"), help="a new folder")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    seconds, start = {}, time.monotonic()
    for name, result in stages(given.package, given.model, given.out, given.steps):
        seconds[name] = round(time.monotonic() - start - sum(seconds.values()), 1)
        print(f"{seconds[name]:7.0f} s  {name}: {result}", flush=True)
    facts = {"package": given.package, "model": given.model, "steps": given.steps, "cores": os.cpu_count(), "stages": seconds}
    write_json(given.out / "road.json", facts)
    print(f"{sum(seconds.values()) / 60:.0f} minutes in all: {given.out / 'road.json'}")


if __name__ == "__main__":
    main()
