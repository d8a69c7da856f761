"""The whole road: tasks, training with Ctrl-C, evaluation, export, one answer over HTTP."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGES = ["tasks make", "train --dry-run", "train, Ctrl-C", "train, resumed", "eval --against", "export", "serve model"]


@pytest.mark.slow
def test_the_whole_road_on_the_shipped_repository(tmp_path):
    larder = ROOT / "composer_replication" / "data" / "repos" / "larder"
    ran = subprocess.run([sys.executable, ROOT / "tools" / "road.py", "--package", larder, "--out", tmp_path / "road"],
                         capture_output=True, text=True, timeout=1800)
    assert ran.returncode == 0, ran.stderr[-2000:]
    *lines, last = ran.stdout.splitlines()
    stages = dict(line.split("s  ", 1)[1].split(": ", 1) for line in lines)
    kept = json.loads((tmp_path / "road" / "road.json").read_text())
    assert list(stages) == STAGES == list(kept["stages"]) and "minutes in all" in last
    assert stages["train, Ctrl-C"] == "exit code 130" and stages["train, resumed"] == "step 3 of 3"
