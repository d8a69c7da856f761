"""A stand-in for a Kubernetes API server, for `kubectl` itself: discovery, strict validation, jobs with a deadline, logs.

Objects are held to Kubernetes' own schemas by the package `kubernetes_validate`. The controllers are stand-ins: a job starts one
pod at once, and fails with DeadlineExceeded where its `activeDeadlineSeconds` have passed on the server's clock, which a test
moves by `pass_time`.
"""
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import kubernetes_validate

KINDS = {"configmaps": ("v1", "ConfigMap"), "services": ("v1", "Service"), "pods": ("v1", "Pod"), "jobs": ("batch/v1", "Job")}
PATHS = {"v1": "/api/v1", "batch/v1": "/apis/batch/v1"}
LOG = "step 1 of 2: loss 0.1\n"


def resources(version):
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": [
        {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind,
         "verbs": ["create", "delete", "get", "list"]}
        for name, (of, kind) in KINDS.items() if of == version]}


def openapi(version):
    "Says that this server validates fields itself, without which kubectl would ask for all schemas."
    group, _, v = f"/{version}".rpartition("/")
    return {"openapi": "3.0.0", "info": {"title": "stand-in", "version": "v1.32"}, "paths": {
        f"{PATHS[version]}/namespaces/{{namespace}}/{name}": {"patch": {  # where kubectl looks, for every verb
            "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}], "responses": {},
            "x-kubernetes-group-version-kind": {"group": group.strip("/"), "version": v, "kind": kind}}}
        for name, (of, kind) in KINDS.items() if of == version}}


FIXED = {
    "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [
        {"name": "batch", "versions": [{"groupVersion": "batch/v1", "version": "v1"}],
         "preferredVersion": {"groupVersion": "batch/v1", "version": "v1"}}]},
    "/openapi/v3": {"paths": {path.lstrip("/"): {"serverRelativeURL": f"/openapi/v3{path}"} for path in PATHS.values()}},
    **{path: resources(version) for version, path in PATHS.items()},
    **{f"/openapi/v3{path}": openapi(version) for version, path in PATHS.items()}}


class Cluster:
    "What the server holds."

    def __init__(self):
        self.objects, self.clock, self.asked = {}, 0.0, []

    def pass_time(self, seconds):
        "The clock moves on; jobs whose deadline has passed fail, and their pods are gone."
        self.clock += seconds
        for (kind, name), job in list(self.objects.items()):
            if kind != "jobs" or "active" not in job["status"]:
                continue
            if self.clock - job["status"]["began"] >= job["spec"]["activeDeadlineSeconds"]:
                job["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}
                self.objects.pop(("pods", f"{name}-0-abcde"), None)

    def create(self, kind, thing):
        "201 with the object, or 422 with Kubernetes' own words for what is wrong with it."
        key = kind, thing["metadata"]["name"]
        try:
            kubernetes_validate.validate(thing, "1.32", strict=True)
        except kubernetes_validate.ValidationError as error:
            return 422, failure(422, "Invalid", str(error.message))
        if key in self.objects:
            return 409, failure(409, "AlreadyExists", f'{kind} "{key[1]}" already exists')
        thing["metadata"] |= {"namespace": "default", "uid": "0"}
        self.objects[key] = thing
        if kind == "jobs":
            labels = {"batch.kubernetes.io/job-name": key[1]}
            thing["spec"]["selector"] = {"matchLabels": labels}
            thing["status"] = {"active": 1, "began": self.clock}
            pod = f"{key[1]}-0-abcde"
            self.objects["pods", pod] = {
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod, "namespace": "default", "labels": labels},
                "spec": thing["spec"]["template"]["spec"], "status": {"phase": "Running"}}
        return 201, thing

    def answer(self, method, path, body):
        "Status and JSON, or text."
        if method == "GET" and path in FIXED:
            return 200, FIXED[path]
        match = re.fullmatch(r"(/api/v1|/apis/batch/v1)/namespaces/default/(\w+)(?:/([\w-]+))?(/log)?", path)
        if not match or match[2] not in KINDS or PATHS[KINDS[match[2]][0]] != match[1]:
            return 404, failure(404, "NotFound", path)
        kind, name = match[2], match[3]
        if method == "POST":
            return self.create(kind, body)
        if name is None:
            version, of = KINDS[kind]
            items = [thing for (other, _), thing in self.objects.items() if other == kind]
            return 200, {"kind": f"{of}List", "apiVersion": version, "metadata": {}, "items": items}
        if (kind, name) not in self.objects:
            return 404, failure(404, "NotFound", f'{kind} "{name}" not found')
        if method == "DELETE":
            self.objects.pop((kind, name))
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        return 200, LOG if match[4] else self.objects[kind, name]


def failure(code, reason, message):
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message}


def handler(cluster):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self):
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            cluster.asked.append((self.command, self.path))
            status, answer = cluster.answer(self.command, self.path.partition("?")[0], body)
            text = isinstance(answer, str)
            content = (answer if text else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if text else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = respond

        def log_message(self, *args):
            pass
    return Handler


@contextmanager
def kube_server():
    "The cluster, and the text of a kubeconfig that leads to it."
    cluster = Cluster()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(cluster))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield cluster, json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}], "users": [{"name": "me", "user": {}}]})
    finally:
        server.shutdown()
        server.server_close()
