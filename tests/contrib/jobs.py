"""Jobs that several tests write, a command that the held-out guard has stopped, and waiting."""
import time
from dataclasses import replace

from composer_replication.contrib.launch.job import LaunchJob, limit_of

NASTY = "it's \"$(touch pwned)\" `touch pwned` $HOME ; touch pwned \\ # {{ name }} é"
RECIPE = "task: toy  # \x7f 😀 \u2028 $(HOME)\nmodel: embedded\n'''\"\"\"\n"
JOB = LaunchJob("toy", ("composer-rl", "train", "--config", "/job/toy.yaml", "--set", NASTY), "/runs/toy",
          limit_of(budget=12, price=3), {"toy.yaml": RECIPE}, "out/toy", ("HF_TOKEN",), gpus=8, hardware="H100",
          image="registry.invalid/a/b:1", storage="s3://bucket/runs")
RUN = ["composer-rl", "jobs", "run", "/runs/toy", "--seconds", "14400", "--", *JOB.command]
RENTED = replace(JOB, env=(), hardware="ml.g5.2xlarge", role="arn:aws:iam::123456789012:role/train")
GUARDED = """
import json, os, sys, time
os.makedirs("checkpoint-3")
state = {"stateful_callbacks": {"HeldOutGuard": {"guard": {"reason": "Stopped at step 3: the KL is too large."}}}}
json.dump(state, open("checkpoint-3/trainer_state.json", "w"))
open("checkpoint-3/complete.json", "w").write("{}")
time.sleep(float(sys.argv[1]))
"""


def wait(until, seconds=600):
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.05)
