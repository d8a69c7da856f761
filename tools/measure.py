"""Time commands on a fresh copy of the tree: python tools/measure.py -> docs/measured.json

    python tools/measure.py         `make demo` and `make test`, in that order, with an empty cache; as long as they take
    python tools/measure.py starts  how long a command takes to begin, in a minute or two

The copy holds what git would commit and nothing else.
"""
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1500  # seconds for each command


def fresh_copy(to: Path) -> Path:
    "The files that git knows or would add, without those that it ignores."
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                          capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def timed(command: list[str], folder: Path, environment: dict) -> tuple[float, str]:
    "Seconds and output of a command; raises where it fails."
    start = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=LIMIT)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")
    return time.monotonic() - start, done.stdout


STARTS = {  # what it is called in the file: the program's words
    "help": ["composer.py", "--help"], "explore": ["composer.py", "explore", "--json"],
    "first_training_step": ["composer.py", "train", "--config", "toy", "--set", "max_steps=1", "--set", "output_dir={number}"],
    "import_typer_help": ["-c", "import typer.rich_utils"],  # the first cannot do without
    "import_torch": ["-c", "import torch"],  # nor the others without these two
    "import_model": ["-c", "import transformers.models.qwen3.modeling_qwen3"]}
RUNS = 3  # of each, the least of which counts: what else runs only adds


def cpu_seconds(command: list[str], folder: Path, environment: dict) -> float:
    "CPU seconds of a command and of all that it starts; raises where it fails."
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    timed(command, folder, environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def starts() -> dict:
    "CPU seconds of each command of `STARTS`: the first time, when Python compiles what it imports, and later."
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = fresh_copy(Path(folder) / "main")
        (tree / "composer.py").write_text("from composer_replication.cli.app import main\nmain()\n")
        plain = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")}
        for name, words in STARTS.items():
            environment = plain | {"PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": f"{folder}/compiled/{name}"}
            first, *later = (cpu_seconds([sys.executable, *(word.format(number=number) for word in words)], tree, environment)
                             for number in range(1 + RUNS))
            measured[name] = {"first": round(first, 2), "later": round(min(later), 2)}
    return measured


def write(measured: dict) -> None:
    "Into the file, where other figures stay."
    file = ROOT / "docs" / "measured.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | measured, indent=1) + "\n")
    print(json.dumps(measured))


def main() -> None:
    "Measure and write."
    if sys.argv[1:] == ["starts"]:
        return write({"start_cpu_seconds": starts() | {"date": f"{date.today()}"}})
    with tempfile.TemporaryDirectory() as folder:
        tree = fresh_copy(Path(folder) / "main")
        environment = {**os.environ, "PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1"}
        install, _ = timed(["make", ".venv/.installed"], tree, environment)
        demo, _ = timed(["make", "demo"], tree, environment)
        test, output = timed(["make", "test"], tree, environment)
    measured = {"install_seconds": round(install), "demo_seconds": round(demo), "test_seconds": round(test),
                "tests": output.strip().splitlines()[-1], "cores": os.cpu_count(),
                "python": ".".join(map(str, sys.version_info[:3])),
                "checks": dict(re.findall(r"^check (\w+): ok, ([\d.]+) s$", output, re.M))}
    write(measured)


if __name__ == "__main__":
    main()
