"""SageMaker for tests: moto's, and what moto 5.2.5 has not: the time that a training job takes, its machine, and its end.

moto's own: S3, CloudWatch Logs, CreateTrainingJob, DescribeTrainingJob. Ours, by what we know of AWS and not checked there:
the states between InProgress and the end, StopTrainingJob, a name that is taken, and a machine that runs the entry point.
"""
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import boto3
import psutil
from moto.core.responses import EmptyResult
from moto.sagemaker.exceptions import ResourceInUseException, ValidationError
from moto.sagemaker.models import FakeTrainingJob, SageMakerModelBackend, sagemaker_backends
from moto.sagemaker.responses import SageMakerResponse
from moto.server import ThreadedMotoServer

REGION, ACCOUNT, GROUP = "us-east-1", "123456789012", "/aws/sagemaker/TrainingJobs"
PATIENCE = 120  # seconds between SIGTERM and SIGKILL, as SageMaker has it


def stop_training_job(self):
    "StopTrainingJob, which moto lacks."
    job = self.sagemaker_backend.training_jobs.get(self._get_param("TrainingJobName"))
    if job is None or job.training_job_status != "InProgress":
        state = job.training_job_status if job else "absent"
        raise ValidationError(message=f"The request was rejected because the training job is in status {state}.")
    job.training_job_status = job.secondary_status = "Stopping"
    return EmptyResult()


def parts(uri):
    "Bucket and prefix of an S3 URI."
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return bucket, prefix.rstrip("/") + "/"


class Machine:
    "What SageMaker starts for a training job: its files under `root` in place of /opt/ml, and its entry point as a process."

    def __init__(self, job, root):
        self.job, self.root, self.told, self.asked = job, root, 0, 0.0
        for channel in job.input_data_config:
            source = channel["DataSource"]["S3DataSource"]["S3Uri"]
            self.download(source, root / "input" / "data" / channel["ChannelName"])
        self.kept = root / job.checkpoint_config["LocalPath"].removeprefix("/opt/ml/")
        self.download(job.checkpoint_config["S3Uri"], self.kept)  # of an earlier start
        words = [word.replace("/opt/ml", str(root)) for word in job.algorithm_specification["ContainerEntrypoint"]]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # composer-rl is on the image's path
        with (root / "out").open("wb") as out:
            self.process = subprocess.Popen(words, cwd=root, env=os.environ | {"PATH": path}, start_new_session=True,
                                            stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def download(self, uri, folder):
        folder.mkdir(parents=True)
        bucket, prefix = parts(uri)
        s3 = boto3.client("s3")
        for item in s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ()):
            path = folder / item["Key"].removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, item["Key"], str(path))

    def upload(self):
        bucket, prefix = parts(self.job.checkpoint_config["S3Uri"])
        for path in self.kept.rglob("*"):
            if path.is_file():
                boto3.client("s3").upload_file(str(path), bucket, prefix + path.relative_to(self.kept).as_posix())

    def tell(self):
        "New whole lines of its output, to CloudWatch."
        lines = (self.root / "out").read_text(errors="replace").splitlines()[self.told:]
        if lines:
            events = [{"timestamp": int(time.time() * 1000), "message": line or " "} for line in lines]
            stream = f"{self.job.training_job_name}/algo-1-1"
            boto3.client("logs").put_log_events(logGroupName=GROUP, logStreamName=stream, logEvents=events)
            self.told += len(lines)

    def end(self, number):
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def kill(self):
        "The machine is gone: everything that it ran."
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            below = []
        self.end(signal.SIGKILL)
        for process in below:
            try:
                process.kill()
            except psutil.Error:
                continue
        self.process.wait(60)


class SageMaker:
    "The training jobs that moto holds, and their machines. Nothing moves but by `start`, `look`, `reclaim` and `pass_time`."

    def __init__(self, root):
        self.root, self.machines, self.began, self.clock, self.count = root, {}, {}, 0.0, 0

    def job(self, name):
        return sagemaker_backends[ACCOUNT][REGION].training_jobs[name]

    def start(self, name):
        "A machine begins or, after `reclaim`, begins again."
        self.count += 1
        root = self.root / f"machine-{self.count}"
        root.mkdir()
        if name not in self.began:
            boto3.client("logs").create_log_stream(logGroupName=GROUP, logStreamName=f"{name}/algo-1-1")
        self.began.setdefault(name, self.clock)
        self.machines[name] = Machine(self.job(name), root)
        self.job(name).secondary_status = "Training"

    def look(self, name):
        "One look at a job: its log, SIGTERM or SIGKILL if it is to stop, its end. Whether it has ended."
        job, machine = self.job(name), self.machines[name]
        code = machine.process.poll()
        if code is None and job.training_job_status == "Stopping":
            machine.asked = machine.asked or time.monotonic()
            machine.end(signal.SIGTERM if time.monotonic() - machine.asked < PATIENCE else signal.SIGKILL)
        machine.tell()
        if code is not None and job.training_job_status in ("InProgress", "Stopping"):
            machine.upload()
            self.finish(job, code)
        return code is not None

    def finish(self, job, code):
        stopped, why = job.training_job_status == "Stopping", job.secondary_status
        job.training_job_status = "Stopped" if stopped else "Failed" if code else "Completed"
        job.secondary_status = why if why == "MaxRuntimeExceeded" else job.training_job_status
        if job.training_job_status == "Failed":
            job.failure_reason = f"AlgorithmError: , exit code: {code}"

    def reclaim(self, name):
        "Somebody pays more for the machine: what was kept by then is in the bucket, all else is gone."
        machine = self.machines.pop(name)
        machine.kill()
        machine.upload()
        self.job(name).secondary_status = "Interrupted"

    def pass_time(self, seconds):
        "The clock moves on; what has run for longer than its request allows is stopped."
        self.clock += seconds
        for name, began in self.began.items():
            job = self.job(name)
            if job.training_job_status == "InProgress" and self.clock - began >= job.stopping_condition["MaxRuntimeInSeconds"]:
                job.training_job_status, job.secondary_status = "Stopping", "MaxRuntimeExceeded"


@contextmanager
def sagemaker_server(root, monkeypatch):
    "A `SageMaker`, with a bucket named bucket, and the environment by which aws and boto3 reach it."
    made, create = FakeTrainingJob.__init__, SageMakerModelBackend.create_training_job

    def begin(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.training_job_status, self.secondary_status = "InProgress", "Starting"

    def create_once(self, training_job_name, **fields):
        if training_job_name in self.training_jobs:
            raise ResourceInUseException(message="Training job names must be unique within an AWS account and region")
        return create(self, training_job_name=training_job_name, **fields)

    monkeypatch.setattr(FakeTrainingJob, "__init__", begin)
    monkeypatch.setattr(SageMakerModelBackend, "create_training_job", create_once)
    monkeypatch.setattr(SageMakerResponse, "stop_training_job", stop_training_job, raising=False)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    place = SageMaker(root)
    try:
        here = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": REGION, "HOME": str(root),
                "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port())}
        for name, value in here.items():
            monkeypatch.setenv(name, value)
        urlopen(Request(os.environ["AWS_ENDPOINT_URL"] + "/moto-api/reset", method="POST"), timeout=60).close()
        boto3.DEFAULT_SESSION = None  # it would remember the server before
        boto3.client("s3").create_bucket(Bucket="bucket")
        boto3.client("logs").create_log_group(logGroupName=GROUP)
        yield place
    finally:
        for machine in place.machines.values():
            machine.kill()
        server.stop()
