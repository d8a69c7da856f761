"""Each place's spec, held to what it reads: bash, Kubernetes' schemas, SkyPilot's fields, AWS's shapes, a stub of Modal."""
import ast
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from jobs import JOB, NASTY, RECIPE, RENTED, RUN

from composer_replication.contrib.launch.job import LaunchProblem, Limit, limit_of, on_every_gpu, plain_name
from composer_replication.contrib.launch.specs import as_json, kubernetes, modal, sagemaker, sky, slurm

FIXTURE = Path(__file__).parents[1] / "fixtures" / "sagemaker" / "create_training_job.json"


# Limits

@pytest.mark.parametrize(("hours", "budget", "price", "seconds"), [
    (2, None, None, 7200), (None, 12, 3, 14400), (2, 12, 3, 7200), (10, 12, 3, 14400), (None, 1, 7, 514)])
def test_money_becomes_time(hours, budget, price, seconds):
    limit = limit_of(hours, budget, price)
    assert limit.seconds == seconds and (budget is None or seconds / 3600 * price <= budget)


@pytest.mark.parametrize("given", [{}, {"budget": 5}, {"price": 3}, {"hours": 0}, {"hours": -1},
                                   {"hours": math.inf}, {"hours": math.nan}, {"budget": 5, "price": 0}, {"hours": 1e-5}])
def test_no_limit_is_no_job(given):
    with pytest.raises(LaunchProblem):
        limit_of(**given)


@pytest.mark.parametrize("field", [
    {"name": "a b"}, {"name": "-x"}, {"name": "x\n"}, {"name": "a" * 41}, {"image": "a b"}, {"image": "$(x)"}, {"storage": "a;b"},
    {"storage": "a'b"}, {"hardware": "H100\n#SBATCH --x"}, {"role": "not an arn"}, {"env": ("A=b",)}, {"env": ("1A",)},
    {"env": ("A}\n",)}, {"command": ("a\nb",)}, {"folder": "a\x1b"}, {"gpus": -1}, {"cpus": 0}, {"machines": 0}])
def test_what_no_spec_can_hold_is_refused(field):
    with pytest.raises(LaunchProblem):
        replace(JOB, **field)


@pytest.mark.parametrize("text", ["", "8b", "Qwen2.5 Coder; rm -rf /", "-" * 90, "é", "x" * 90, "a" * 39 + "-b"])
def test_any_name_becomes_a_plain_one(text):
    assert replace(JOB, name=plain_name(text))


# Slurm

def directives(script):
    "The #SBATCH lines as sbatch reads them: only before the first command."
    lines = script.splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    return dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines[:first] if line.startswith("#SBATCH"))


def test_the_slurm_script_has_its_deadline_and_goes_on_after_a_preemption():
    assert directives(slurm(JOB)) == {
        "job-name": "toy", "nodes": "1", "ntasks-per-node": "1", "cpus-per-task": "64", "gpus-per-node": "H100:8", "time": "240",
        "signal": "TERM@300", "dependency": "singleton", "requeue": "", "open-mode": "append"}
    assert directives(slurm(replace(JOB, limit=Limit(61))))["time"] == "2"
    assert "gpus-per-node" not in directives(slurm(replace(JOB, gpus=0)))


@pytest.mark.parametrize("asked, cores", [({}, 64), ({"gpus": 0}, 2), ({"cpus": 24}, 24), ({"gpus": 0, "cpus": 5}, 5)])
def test_a_slurm_task_gets_its_cores_from_sbatch_and_from_srun(asked, cores):
    "Since Slurm 22.05 srun does not take over what sbatch was asked."
    script = slurm(replace(JOB, **asked))
    assert directives(script)["cpus-per-task"] == str(cores)
    assert shlex.split(script.splitlines()[-1])[:3] == ["srun", f"--cpus-per-task={cores}", "--kill-on-bad-exit=1"]


@pytest.mark.parametrize("machines", [1, 3])
def test_bash_runs_the_slurm_script_and_nothing_else(machines, tmp_path):
    "A stand-in `srun` prints its words; the run's folder has a nasty name, too."
    tools, folder = tmp_path / "bin", tmp_path / "it's $(touch pwned)"
    tools.mkdir()
    for name, text in {"srun": "printf '%s\\n' \"$PET_RDZV_ENDPOINT\" \"$@\"", "scontrol": "printf 'node7\\nnode8\\n'"}.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(slurm(replace(JOB, folder=str(folder), machines=machines)))
    assert subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path, timeout=600).returncode == 0
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "HF_TOKEN": "k", "PET_RDZV_ENDPOINT": "", "SLURM_JOB_NODELIST": "node[7-8]"}
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    meet, *flags, words = (lines := (folder / "log.txt").read_text().splitlines())[0], *lines[1:3], lines[3:]
    assert done.returncode == 0 and words == [*RUN[:3], str(folder), *RUN[4:]]
    assert flags == ["--cpus-per-task=64", "--kill-on-bad-exit=1"]
    assert meet == ("node7:29500" if machines > 1 else "") and not list(tmp_path.rglob("pwned"))

    environment.pop("HF_TOKEN")
    assert subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, timeout=600).returncode != 0
    assert "HF_TOKEN: is not set; set it where you call sbatch" in (folder / "log.txt").read_text()


# Kubernetes

@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize("version", ["1.29", "1.36"])
def test_kubernetes_takes_every_document_strictly(version, machines):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    documents = list(yaml.safe_load_all(kubernetes(replace(JOB, storage="runs", machines=machines))))
    assert [d["kind"] for d in documents] == ["ConfigMap", *["Service"] * (machines > 1), "Job"]
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_kubernetes_job_has_a_deadline_and_its_words():
    *files, job = yaml.safe_load_all(kubernetes(replace(JOB, storage="runs", machines=2)))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 2
    assert spec["activeDeadlineSeconds"] + pod["terminationGracePeriodSeconds"] == 14400
    container, = pod["containers"]
    # the kubelet makes "$" of "$$" and expands "$(NAME)": third_party/forked/golang/expansion
    assert [word.replace("$$", "$") for word in container["command"]] == RUN
    assert not re.search(r"(?<!\$)\$\(", " ".join(container["command"]))
    assert files[0]["data"] == {"toy.yaml": RECIPE} and container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    key, meet = container["env"]
    assert key == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "composer-rl", "key": "HF_TOKEN"}}}
    assert meet["value"] == "toy-0.toy:29500" and files[1]["metadata"]["name"] == pod["subdomain"] == "toy"
    ends, = (rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "FailJob")
    assert ends["onExitCodes"]["containerName"] == container["name"] and ends["onExitCodes"]["values"] == [1, 2, 3]


def test_a_pod_shares_memory_and_can_be_given_what_bubblewrap_needs():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    text = kubernetes(replace(JOB, storage="runs"))
    job = list(yaml.safe_load_all(text))[-1]
    pod = job["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    said = re.search(r"# (securityContext: .*)", text)[1]
    page = (Path(__file__).parents[2] / "docs" / "guides" / "other-machines.md").read_text()
    assert said in page and "hostUsers: false" in page and "hostUsers: false" in text
    pod["containers"][0] |= yaml.safe_load(said)
    pod["hostUsers"] = False
    kubernetes_validate.validate(job, "1.36", strict=True)


# SkyPilot

def test_the_sky_file_says_spot_autostop_and_the_dearest_machine():
    task = yaml.safe_load(sky(replace(JOB, machines=2, storage="s3://bucket")))
    assert set(task) == {"name", "num_nodes", "resources", "secrets", "file_mounts", "run"}
    assert task["resources"] == {"accelerators": "H100:8", "use_spot": True, "image_id": "docker:registry.invalid/a/b:1",
                                 "max_hourly_cost": 1.5, "autostop": {"idle_minutes": 10, "down": True}}
    assert task["secrets"] == {"HF_TOKEN": None} and task["num_nodes"] == 2
    assert task["file_mounts"] == {"/job/toy.yaml": "out/toy/toy.yaml", "/runs": {"source": "s3://bucket", "mode": "MOUNT"}}
    meet, run = task["run"].splitlines()
    assert shlex.split(run) == RUN and "SKYPILOT_NODE_IPS" in meet


# SageMaker

def shape_problems(value, name, model, where="request"):
    "What a value has against an AWS shape: unknown and missing members, kinds, lengths, ranges, patterns, enumerations."
    shape = model["shapes"][name]
    kinds = {"structure": dict, "map": dict, "list": list, "string": str, "integer": int, "long": int, "boolean": bool}
    if type(value) is not kinds[shape["type"]]:
        return [f"{where} is a {type(value).__name__}"]
    found, size = [], value if shape["type"] in ("integer", "long") else len(value) if hasattr(value, "__len__") else 0
    if not shape.get("min", size) <= size <= shape.get("max", size):
        found.append(f"{where} has size {size}")
    if "pattern" in shape and not re.fullmatch(shape["pattern"].replace(r"\p{L}\p{Z}\p{N}", r"\w\s"), value):
        found.append(f"{where} {value!r} does not match {shape['pattern']}")
    if "enum" in shape and value not in shape["enum"]:
        found.append(f"{where} {value!r} is none of {len(shape['enum'])}")
    if shape["type"] == "structure":
        found += [f"{where} lacks {member}" for member in shape.get("required", ()) if member not in value]
        for key, inner in value.items():
            found += (shape_problems(inner, shape["members"][key]["shape"], model, f"{where}.{key}") if key in shape["members"]
                      else [f"{where} has an unknown {key}"])
    if shape["type"] == "list":
        of = shape["member"]["shape"]
        found += [problem for i, inner in enumerate(value) for problem in shape_problems(inner, of, model, f"{where}[{i}]")]
    return found


def test_the_sagemaker_request_is_what_aws_takes():
    model, request = json.loads(FIXTURE.read_text()), json.loads(sagemaker(RENTED))
    assert shape_problems(request, model["input"], model) == []
    assert request["StoppingCondition"]["MaxRuntimeInSeconds"] == 14400 < request["StoppingCondition"]["MaxWaitTimeInSeconds"]
    assert request["EnableManagedSpotTraining"] is True and request["AlgorithmSpecification"]["ContainerEntrypoint"] == RUN
    assert "Environment" not in request


@pytest.mark.parametrize("change", [
    lambda r: r.pop("RoleArn"), lambda r: r.update(Deadline=1), lambda r: r["StoppingCondition"].update(MaxRuntimeInSeconds=0),
    lambda r: r["ResourceConfig"].update(InstanceType="ml.toaster"), lambda r: r.update(TrainingJobName="a b"),
    lambda r: r["AlgorithmSpecification"]["ContainerEntrypoint"].append("x" * 257), lambda r: r["Tags"][0].update(Value="a, b")])
def test_a_request_that_aws_would_refuse_is_found(change):
    model, request = json.loads(FIXTURE.read_text()), json.loads(sagemaker(RENTED))
    change(request)
    assert len(shape_problems(request, model["input"], model)) == 1


@pytest.mark.parametrize("field", [{"env": ("HF_TOKEN",)}, {"role": ""}, {"hardware": "H100"}, {"storage": "gs://x"},
                                   {"here": "/x/$HOME/y"}, {"here": "/x/${HOME}"}, {"command": ("x" * 257,)}])
def test_what_sagemaker_cannot_hold_is_refused(field):
    with pytest.raises(LaunchProblem):
        sagemaker(replace(RENTED, **field))


# Modal

def modal_stub(calls):
    "NOT Modal: a stand-in for its module that records what a file asks of it, for where Modal is not installed: see test_clouds."
    stub = types.ModuleType("modal")

    class Recorder:
        def __init__(self, name):
            self.name = name

        def __call__(self, *args, **kwargs):
            calls[self.name] = (args, kwargs)
            decorates = self.name in ("App.function", "App.local_entrypoint")
            return (lambda function: function) if decorates else self

        def __getattr__(self, name):
            return Recorder(f"{self.name}.{name}")
    for name in ("App", "Volume", "Image", "Secret"):
        setattr(stub, name, Recorder(name))
    return stub


def test_the_modal_file_sets_timeout_and_one_container_and_runs_the_words(monkeypatch, tmp_path):
    calls, ran, text = {}, [], modal(replace(JOB, storage="runs"))
    monkeypatch.setitem(sys.modules, "modal", modal_stub(calls))
    names = {"__name__": "job_modal"}
    exec(compile(text.replace('"/job"', repr(str(tmp_path))), "job_modal.py", "exec"), names)
    options = calls["App.function"][1]
    wanted = {"timeout": 14400, "max_containers": 1, "retries": 0, "gpu": "H100:8"}
    assert wanted.items() <= options.items() and set(options) == {*wanted, "image", "secrets", "volumes"}
    assert calls["Secret.from_local_environ"] == ((["HF_TOKEN"],), {})
    assert calls["Volume.from_name"] == (("runs",), {"create_if_missing": True})
    monkeypatch.setattr(subprocess, "run",
                        lambda words: ran.append(words) or types.SimpleNamespace(returncode=len(ran) - 1))
    names["train"]()
    assert ran == [RUN] and (tmp_path / "toy.yaml").read_text() == RECIPE
    with pytest.raises(RuntimeError, match="exit code 1"):
        names["train"]()


def test_the_modal_file_holds_nothing_but_literals_of_ours():
    "A name or a setting cannot become code: each stands in one literal."
    tree = ast.parse(modal(replace(JOB, storage="my-runs")))
    literals = {ast.literal_eval(node) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {NASTY, RECIPE, "my-runs"} <= literals


# All

STORED = {slurm: "", kubernetes: "runs", sky: "s3://bucket", modal: "runs", sagemaker: "s3://bucket/runs"}


@pytest.mark.parametrize("spec", [slurm, kubernetes, sky, modal])
def test_no_value_of_a_variable_is_in_a_spec(spec, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_value_that_is_secret")
    text = spec(replace(JOB, storage=STORED[spec]))
    assert "hf_value_that_is_secret" not in text and "HF_TOKEN" in text


@pytest.mark.parametrize(("spec", "storage"), [
    (kubernetes, "s3://bucket/runs"), (kubernetes, "Runs"), (modal, "s3://bucket/runs"), (modal, "a/b"), (modal, "a" * 64),
    (sky, "runs"), (sky, "s3://bucket/runs"), (sky, "file://x"), (sky, "cos://region"),
    (sagemaker, "s3://"), (sagemaker, "runs")])
def test_storage_that_a_place_cannot_mount_is_refused(spec, storage):
    "What Modal and SkyPilot themselves take: tests/contrib/test_clouds.py."
    with pytest.raises(LaunchProblem, match="cannot mount"):
        spec(replace(RENTED, storage=storage))


@pytest.mark.parametrize("storage", ["s3://bucket", "gs://bucket/", "cos://us-east/bucket", "https://me.invalid/container"])
def test_a_whole_bucket_is_mounted_by_sky(storage):
    assert yaml.safe_load(sky(replace(JOB, storage=storage)))["file_mounts"]["/runs"]["source"] == storage


@pytest.mark.parametrize("text", [NASTY, RECIPE, "\x00\x1b\x85\xa0\ufeff\ufffe", "- : #", "yes"])
def test_json_of_any_text_is_yaml(text):
    assert yaml.safe_load(as_json(text)) == json.loads(as_json(text)) == text


def test_a_process_starts_on_each_gpu(tmp_path):
    "Real torchrun on two processes and two 'machines' of one: it takes these words, and PET_RDZV_ENDPOINT."
    assert on_every_gpu(["x"], "n", 1) == ("x",) and on_every_gpu(["x"], "n", 0) == ("x",)
    words = on_every_gpu(["bash", "-c", "echo $RANK > rank-$RANK"], "toy", 2)
    words = [Path(sys.executable).with_name(words[0]), *words[1:]]
    unnamed = ["unshare", "--uts", "bash", "-c", 'hostname nobody-knows-me && exec "$@"', "unnamed"]  # as in a bare container
    if shutil.which("unshare") and subprocess.run([*unnamed, "true"], capture_output=True).returncode == 0:
        words = [*unnamed, *words]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=600, capture_output=True)
    assert {p.name for p in tmp_path.iterdir()} == {"rank-0", "rank-1"}
