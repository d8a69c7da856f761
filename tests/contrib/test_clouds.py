"""Specs and clients before the clouds' own programs, without an account or a network: `make test-clouds`."""
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from jobs import JOB, RENTED, wait

from composer_replication.contrib.launch.clients import (
    TARGETS,
    ask,
    filled,
    job_cancel,
    job_logs,
    job_record,
    job_status,
    submit,
    write_job,
)
from composer_replication.contrib.launch.job import LaunchJob, LaunchProblem, limit_of
from composer_replication.contrib.launch.specs import modal, sagemaker, sky
from composer_replication.contrib.launch.watch import read_status

HERE = Path(sys.executable).parent
FIXTURE = Path(__file__).parents[1] / "fixtures" / "sagemaker" / "create_training_job.json"


@pytest.fixture
def own_programs(tmp_path, monkeypatch):
    "The programs of the environment that runs the tests come first; nobody's settings are read."
    monkeypatch.setenv("PATH", f"{HERE}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))


# SageMaker: the `aws` program against moto

@pytest.fixture
def place(own_programs, tmp_path, monkeypatch):
    for name in ("awscli", "moto"):  # not imported: awscli puts its own models before botocore's
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed: make test-clouds")
    from sagemaker_server import sagemaker_server
    (tmp_path / "aws").mkdir()
    with sagemaker_server(tmp_path / "aws", monkeypatch) as place:
        yield place


def aws_job(folder, script="true", limit=None):
    "Its command says what the script says, in the run's folder as SageMaker names it."
    return LaunchJob("toy", ("bash", "-c", script), "/opt/ml/checkpoints", limit or limit_of(hours=1),
                     {"toy.yaml": "task: toy\n"}, str(folder), hardware="ml.g5.2xlarge",
                     image="registry.invalid/x:1", storage="s3://bucket/runs", role=RENTED.role)


def kept(record, name):
    "Text of a file among the checkpoints, as the bucket has it."
    import boto3
    key = f"{record['place'].removeprefix('s3://bucket/')}/checkpoints/{name}"
    return boto3.client("s3").get_object(Bucket="bucket", Key=key)["Body"].read().decode()


def status_kept(record):
    return json.loads(kept(record, "job-status.json"))


POLITE = "trap 'echo a last checkpoint | tee /opt/ml/checkpoints/last; exit 130' TERM; echo begun; sleep 600 & wait"
FOREVER = "cat /opt/ml/input/data/job/toy.yaml; " + POLITE


def test_aws_hands_over_the_recipe_and_the_whole_request(place, tmp_path):
    import boto3
    record = submit(aws_job(tmp_path / "it's $(one) ~"), "sagemaker")
    request = json.loads(Path(record["spec"]).read_text())
    held = boto3.client("sagemaker").describe_training_job(TrainingJobName=record["job"])
    assert record["id"] == held["TrainingJobArn"]
    for key, value in request.items():
        if key != "Tags":
            assert (value.items() <= held[key].items()) if isinstance(value, dict) else value == held[key], key
    assert boto3.client("sagemaker").list_tags(ResourceArn=record["id"])["Tags"] == request["Tags"]
    body = boto3.client("s3").get_object(Bucket="bucket", Key="runs/toy/input/toy.yaml")["Body"].read()
    assert body == b"task: toy\n" and job_status(record) == "InProgress\tStarting\tNone" and job_logs(record, 9) == ""
    with pytest.raises(LaunchProblem, match="a job runs in"):
        submit(aws_job(tmp_path / "it's $(one) ~"), "sagemaker")
    with pytest.raises(LaunchProblem, match="ResourceInUse.*must be unique"):
        ask(filled(TARGETS["sagemaker"].submit[1], record))


def test_a_folder_in_which_aws_would_read_a_variable_is_refused(place, tmp_path):
    with pytest.raises(LaunchProblem, match="names a variable"):
        write_job(aws_job(tmp_path / "a $HOME"), "sagemaker")
    record = write_job(aws_job(tmp_path / "a"), "sagemaker")
    with pytest.raises(LaunchProblem, match="No such file"):  # why: `aws` itself
        ask(filled(TARGETS["sagemaker"].submit[1], record | {"spec": Path(record["spec"]).rename(tmp_path / "$HOME").as_posix()}))


def test_a_training_job_ends_when_its_budget_is_spent_and_is_not_gone_on_with(place, tmp_path):
    job = aws_job(tmp_path, FOREVER, limit_of(budget=2, price=900))  # eight seconds
    record = submit(job, "sagemaker")
    place.start(record["job"])
    wait(lambda: place.look(record["job"]))
    assert job_status(record) == "Failed\tFailed\tAlgorithmError: , exit code: 3"
    log = job_logs(record, 50).splitlines()
    assert log[:2] == ["task: toy", "begun"] and log[2] == "a last checkpoint" and log[3].startswith("spent: ")
    assert kept(record, "last") == "a last checkpoint\n" and status_kept(record)["state"] == "spent"
    assert status_kept(record)["seconds"] == 8 and "2.00 dollars at 900 an hour" in record["limit"]

    again = submit(job, "sagemaker")
    assert again["job"] != record["job"]
    place.start(again["job"])
    wait(lambda: place.look(again["job"]))
    assert "of 8 seconds of the limit are used" in job_logs(again, 5) and job_status(again).startswith("Failed")


def test_a_cancelled_training_job_writes_a_checkpoint_and_goes_on_from_it(place, tmp_path):
    job = aws_job(tmp_path, "cat /opt/ml/checkpoints/last; " + FOREVER)
    record = submit(job, "sagemaker")
    place.start(record["job"])
    wait(lambda: place.look(record["job"]) or "begun" in job_logs(record, 5))
    assert job_status(record) == "InProgress\tTraining\tNone" and "a last checkpoint" not in job_logs(record, 5)
    assert job_cancel(job_record(tmp_path)) == "asked to end" and job_status(record) == "Stopping\tStopping\tNone"
    wait(lambda: place.look(record["job"]))
    assert job_status(record) == "Stopped\tStopped\tNone" and status_kept(record)["state"] == "stopped"
    with pytest.raises(LaunchProblem, match="is in status Stopped"):
        job_cancel(record)

    used = status_kept(record)["used"]
    again = submit(job, "sagemaker")
    place.start(again["job"])
    wait(lambda: place.look(again["job"]) or "begun" in job_logs(again, 5))
    assert "a last checkpoint" in job_logs(again, 5)  # read where it was kept
    job_cancel(again)
    wait(lambda: place.look(again["job"]))
    assert status_kept(again)["used"] > used


def test_a_reclaimed_spot_machine_leaves_the_next_what_is_left_of_the_limit(place, tmp_path):
    record = submit(aws_job(tmp_path, FOREVER, limit_of(hours=20 / 3600)), "sagemaker")
    place.start(record["job"])
    there = place.machines[record["job"]].kept
    wait(lambda: place.look(record["job"]) or (status := read_status(there)) and status.used > 1)
    place.reclaim(record["job"])
    used = status_kept(record)["used"]
    assert job_status(record) == "InProgress\tInterrupted\tNone" and used > 1
    place.start(record["job"])
    again = place.machines[record["job"]].kept
    wait(lambda: place.look(record["job"]) or (status := read_status(again)) and status.used > used)
    assert read_status(again).used > used  # it counts on
    wait(lambda: place.look(record["job"]))
    assert status_kept(record)["state"] == "spent" and "spent: " in job_logs(record, 5)


def test_sagemaker_itself_ends_what_holds_no_watch(place, tmp_path):
    "The entry point hangs before our program: the request's own deadline."
    job = aws_job(tmp_path)
    record = submit(job, "sagemaker")
    place.job(record["job"]).algorithm_specification["ContainerEntrypoint"] = ["sleep", "600"]
    place.start(record["job"])
    place.pass_time(job.limit.seconds - 1)
    assert not place.look(record["job"]) and job_status(record).startswith("InProgress")
    place.pass_time(1)
    wait(lambda: place.look(record["job"]))
    assert job_status(record) == "Stopped\tMaxRuntimeExceeded\tNone"


@pytest.fixture
def model():
    "AWS's own description of SageMaker, as botocore and `aws` have it."
    session = pytest.importorskip("botocore.session", reason="botocore is not installed: make test-clouds")
    return session.get_session().get_service_model("sagemaker")


def problems(model, operation, request):
    from botocore.validate import ParamValidator
    return ParamValidator().validate(request, model.operation_model(operation).input_shape).generate_report()


@pytest.mark.parametrize("field", [
    {}, {"gpus": 0}, {"limit": limit_of(hours=0.01)}, {"storage": "s3://bucket"}, {"name": "a" * 40, "suffix": "-tro8w0"}])
def test_botocore_takes_every_request(field, model):
    request = json.loads(sagemaker(replace(RENTED, **field)))
    assert problems(model, "CreateTrainingJob", request) == ""
    for operation in ("DescribeTrainingJob", "StopTrainingJob"):
        assert problems(model, operation, {"TrainingJobName": request["TrainingJobName"]}) == ""


def test_the_shapes_that_test_specs_reads_are_botocores(model):
    "Those also hold lengths, patterns and enumerations, which botocore does not look at."
    from botocore.loaders import Loader

    def bare(value):
        if isinstance(value, dict):
            prose = {key for key, inner in value.items() if key == "box" or key == "documentation" and isinstance(inner, str)}
            return {key: bare(inner) for key, inner in value.items() if key not in prose}
        return [bare(inner) for inner in value] if isinstance(value, list) else value
    own, ours = Loader().load_service_model("sagemaker", "service-2")["shapes"], json.loads(FIXTURE.read_text())
    assert ours["input"] == model.operation_model("CreateTrainingJob").input_shape.name
    assert ours["shapes"] == {name: bare(own[name]) for name in ours["shapes"]}


@pytest.mark.slow
def test_a_real_run_is_launched_on_sagemaker_cancelled_and_ended_by_its_budget(place, tmp_path):
    "The commands as users type them; the machine runs `composer-rl train` on the embedded model."
    import boto3
    small = ["train_rows=8", "max_completion_length=64", "max_turns=2", "gradient_accumulation_steps=1", "save_steps=1000",
             "max_steps=100000", "output_dir=run"]
    words = ["--on", "sagemaker", "--hardware", "ml.c5.xlarge", "--gpus", "0", "--role", RENTED.role, "--image", "r.invalid/x:1",
             "--storage", "s3://bucket/runs", *(word for value in small for word in ("--set", value))]

    def command(*words):
        words = [HERE / "composer-rl", *words]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=True).stdout

    def launched(*limit):
        record = json.loads(command("launch", "toy", *words, *limit, "--json"))
        place.start(record["job"])
        return record

    def steps(record):
        "Of the checkpoints in the bucket."
        prefix = record["place"].removeprefix("s3://bucket/") + "/checkpoints/checkpoint-"
        keys = boto3.client("s3").list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", ())
        return {int(item["Key"].removeprefix(prefix).partition("/")[0]) for item in keys}

    begun = time.monotonic()
    record = launched("--hours", "2")
    out = place.machines[record["job"]].root / "out"
    wait(lambda: place.look(record["job"]) or "step 2 of 100000" in out.read_text(), 900)
    two_steps = time.monotonic() - begun
    assert "step 2 of 100000" in command("jobs", "logs", "run") and "InProgress" in command("jobs", "status", "run")
    command("jobs", "cancel", "run")
    wait(lambda: place.look(record["job"]), 900)
    first, used = steps(record), status_kept(record)["used"]
    assert "Stopped" in command("jobs", "status", "run") and first

    seconds = used + 3 * two_steps + 60
    record = launched("--budget", "5", "--price", str(5 / seconds * 3600))
    wait(lambda: place.look(record["job"]), 900 + seconds)
    assert "Failed" in command("jobs", "status", "run") and "spent: " in command("jobs", "logs", "run")
    assert status_kept(record)["state"] == "spent" and max(steps(record)) > max(first)


# Modal: its own client before a stand-in for its servers

@pytest.fixture
def servers(own_programs, monkeypatch):
    pytest.importorskip("modal", reason="modal is not installed: make test-clouds")
    from modal_server import modal_server
    with modal_server(monkeypatch) as servers:
        yield servers


def test_modals_client_makes_the_function_with_its_deadline_and_starts_it_once(servers, tmp_path, monkeypatch):
    from modal_proto import api_pb2
    from modal_server import APP
    monkeypatch.setenv("HF_TOKEN", "hf_value_that_is_secret")
    record = submit(replace(JOB, here=str(tmp_path / "run"), storage="runs"), "modal")
    assert record["id"] == APP
    made, = servers.requests("FunctionCreate")
    function = made.function
    assert function.timeout_secs == 14400 and function.retry_policy.retries == 0
    assert function.autoscaler_settings.max_containers == 1
    assert function.resources.gpu_config.gpu_type == "H100" and function.resources.gpu_config.count == 8
    mount, = function.volume_mounts
    assert mount.mount_path == "/runs" and servers.requests("VolumeGetOrCreate")[-1].deployment_name == "runs"
    assert "FROM registry.invalid/a/b:1" in servers.requests("ImageGetOrCreate")[0].image.dockerfile_commands
    secrets = [dict(secret.env_dict) for secret in servers.requests("SecretGetOrCreate")]
    assert secrets == [{"HF_TOKEN": "hf_value_that_is_secret"}]
    assert not any("hf_value_that_is_secret" in path.read_text() for path in (tmp_path / "run").iterdir())
    app, = servers.requests("AppCreate")
    assert app.description == "toy" and app.app_state == api_pb2.APP_STATE_DETACHED  # the terminal may be closed
    started, = servers.requests("FunctionMap")
    assert started.function_call_invocation_type == api_pb2.FUNCTION_CALL_INVOCATION_TYPE_ASYNC

    assert "toy" in job_status(record) and "detache" in job_status(record)
    assert job_logs(record, 5) == "step 1 of 2\nstep 2 of 2" and job_logs(record, 1) == "step 2 of 2"
    job_cancel(job_record(tmp_path / "run"))
    assert [request.app_id for request in servers.requests("AppStop")] == [APP] and "stopped" in job_status(record)


def test_modals_client_refuses_a_job_whose_variable_is_not_set(servers, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(LaunchProblem, match="modal run --detach ended with 1"):
        submit(replace(JOB, here=str(tmp_path), storage="runs"), "modal")
    assert not servers.requests("FunctionMap")


@pytest.mark.parametrize(("script", "hours", "error"), [
    ("cat job/toy.yaml; touch ran", 1, ""), ("touch ran; sleep 600", 3 / 3600, "RuntimeError: the run ended with exit code 3")])
def test_modals_function_runs_under_the_watch_and_keeps_the_volume(script, hours, error, servers, tmp_path):
    "By `.local()`: the function's body here instead of in a container; the second ends by its limit."
    job = replace(JOB, command=("bash", "-c", script), folder=str(tmp_path / "run"), limit=limit_of(hours=hours), storage="runs",
                  env=())
    (tmp_path / "job_modal.py").write_text(modal(job).replace('"/job"', repr(str(tmp_path / "job"))))
    words = [sys.executable, "-c", "import job_modal; job_modal.train.local()"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == bool(error) and error in done.stderr and done.stdout == ("" if error else JOB.files["toy.yaml"])
    assert (tmp_path / "ran").exists() and read_status(tmp_path / "run").state == ("spent" if error else "done")
    assert len(servers.requests("VolumeCommit")) == 1


def taken(ask, *refusals) -> bool:
    "Whether what is asked is not refused."
    try:
        ask()
    except refusals:
        return False
    return True


def test_modal_takes_the_volumes_that_we_take(servers):
    import modal as package
    for name in ("runs", "My.runs_2-x", "s3://bucket/runs", "a/b", "a:b", "a" * 63, "a" * 65):
        theirs = taken(partial(package.Volume.from_name, name, create_if_missing=True), package.exception.InvalidError)
        assert taken(partial(modal, replace(JOB, storage=name)), LaunchProblem) == theirs, name


# SkyPilot: its own reading of a task, and of its command line

@pytest.fixture
def skypilot(own_programs, monkeypatch):
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    return pytest.importorskip("sky", reason="skypilot is not installed: make test-clouds")


MOUNTED = replace(JOB, storage="s3://bucket", machines=2)


def test_skypilot_reads_the_task_as_we_mean_it(skypilot):
    task = skypilot.Task.from_yaml_config(yaml.safe_load(sky(MOUNTED)), secrets_overrides=[("HF_TOKEN", "k")])
    resources, = task.resources
    assert task.name == "toy" and task.num_nodes == 2 and resources.use_spot and resources.accelerators == {"H100": 8}
    assert resources.extract_docker_image() == "registry.invalid/a/b:1" and resources.max_hourly_cost == 1.5
    assert resources.autostop_config.idle_minutes == 10 and resources.autostop_config.down
    assert task.file_mounts == {"/job/toy.yaml": "out/toy/toy.yaml"}
    storage = task.storage_mounts["/runs"]
    assert storage.source == "s3://bucket" and storage.mode == skypilot.StorageMode.MOUNT
    assert {name: value.get_secret_value() for name, value in task.secrets.items()} == {"HF_TOKEN": "k"}
    assert not task.managed_secret_refs  # of SkyPilot's own store, as a variable without a value would be


def test_skypilot_mounts_the_storage_that_we_take(skypilot):
    from sky.data.storage import Storage, StorageMode
    sources = ["s3://bucket", "s3://bucket/", "gs://bucket", "cos://region/bucket", "https://me.invalid/container", "r2://b",
               "s3://bucket/runs", "gs://bucket/a/b", "cos://region", "runs", "file://runs", "bucket:/x"]
    for source in sources:
        theirs = taken(partial(Storage._validate_source, source, StorageMode.MOUNT, True),
                       skypilot.exceptions.StorageModeError, skypilot.exceptions.StorageSourceError)
        assert taken(partial(sky, replace(JOB, storage=source)), LaunchProblem) == theirs, source


@pytest.mark.parametrize("bucket", ["bucket", "absent"])
def test_skypilot_finds_the_bucket_that_it_mounts(bucket, place, skypilot):
    "Its S3 store against moto."
    config = yaml.safe_load(sky(replace(MOUNTED, storage=f"s3://{bucket}", env=(), gpus=0, hardware="")))
    storage = skypilot.Task.from_yaml_config(config).storage_mounts["/runs"]
    if bucket == "bucket":
        storage.construct()
        assert storage.name == "bucket" and len(storage.stores) == 1
    else:
        with pytest.raises(skypilot.exceptions.StorageBucketGetError):
            storage.construct()


@pytest.mark.parametrize("words", [*TARGETS["sky"].submit, TARGETS["sky"].status, TARGETS["sky"].logs, TARGETS["sky"].cancel])
def test_skypilots_command_line_takes_our_words(words, skypilot, tmp_path, monkeypatch):
    "Read by its own parser, and not run: it would start a server."
    import click
    from sky.client.cli import command
    monkeypatch.setenv("HF_TOKEN", "k")
    program, *rest = full = filled(words, write_job(replace(MOUNTED, here=str(tmp_path)), "sky"))
    verb, context = command.cli, click.Context(command.cli, info_name=program)
    while isinstance(verb, click.Group):
        name, verb, rest = verb.resolve_command(context, rest)
        context = (click.Context(verb, parent=context, info_name=name) if isinstance(verb, click.Group)
                   else verb.make_context(name, rest, parent=context))
    given = {name for name in context.params if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE}
    options = {word.partition("=")[0].removeprefix("--").removeprefix("no-") for word in full if word.startswith("--")}
    assert {option.replace("-", "_") for option in options} <= given and context.params.get("name", "toy") == "toy"
    assert ("entrypoint" in given) == full[-1].endswith(".yaml")
