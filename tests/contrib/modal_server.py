"""A stand-in for Modal's servers: it takes every call of Modal's own client, keeps what was asked, and starts nothing."""
import asyncio
import threading
import time
from contextlib import contextmanager

from grpclib.server import Server
from modal_proto import api_grpc, api_pb2

APP = "ap-" + "4" * 22
ID = {"app_id": APP, "function_id": "fu-1", "image_id": "im-1", "volume_id": "vo-1", "secret_id": "st-1", "mount_id": "mo-1",
      "object_id": "ob-1", "function_call_id": "fc-1", "environment_id": "en-1"}


class Servers(api_grpc.ModalClientBase):
    "Every call is kept in `asked` as (name, request). The answers are empty but for identifiers and what `fill` writes."

    def __init__(self):
        self.asked, self.log = [], ["step 1 of 2", "step 2 of 2"]

    def requests(self, name):
        return [request for other, request in self.asked if other == name]

    def fill(self, name, request, reply):
        if name == "EnvironmentGetOrCreate":
            reply.metadata.settings.image_builder_version = "2025.06"
        elif name in ("ImageGetOrCreate", "ImageJoinStreaming"):
            reply.result.status = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
        elif name == "FunctionCreate":
            reply.function_data.ranked_functions.add().function.CopyFrom(request.function)
            reply.handle_metadata.function_name = request.function.function_name
        elif name == "FunctionMap":
            reply.pipelined_inputs.add().input_id = "in-1"
        elif name == "AppList" and (made := self.requests("AppCreate")):
            state = api_pb2.APP_STATE_STOPPED if self.requests("AppStop") else api_pb2.APP_STATE_DETACHED
            reply.apps.add(app_id=APP, description=made[-1].description, state=state)
        elif name == "AppGetLogs":
            reply.app_done = bool(self.requests("AppClientDisconnect"))
        elif name == "AppFetchLogs":
            batch = reply.batches.add()
            for seconds, line in enumerate(self.log[-request.limit:]):
                when = time.time() - 9 + seconds
                batch.items.add(data=line + "\n", timestamp=when, file_descriptor=api_pb2.FILE_DESCRIPTOR_STDOUT)

    def __mapping__(self):
        def handler(name, entry):
            async def take(stream):
                request, reply = await stream.recv_message(), entry.reply_type()
                self.asked.append((name, request))
                if name == "AppGetLogs":
                    await asyncio.sleep(0.5)  # a real one stays open until there is a line
                for field in reply.DESCRIPTOR.fields:
                    if field.name in ID:
                        setattr(reply, field.name, ID[field.name])
                self.fill(name, request, reply)
                await stream.send_message(reply)
            return entry._replace(func=take)
        return {path: handler(path.rpartition("/")[2], entry) for path, entry in super().__mapping__().items()}


Servers.__abstractmethods__ = frozenset()  # one handler answers them all


@contextmanager
def modal_server(monkeypatch):
    "The `Servers`, and the environment by which Modal's client reaches them."
    loop, place = asyncio.new_event_loop(), Servers()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def begin():
        server = Server([place])
        await server.start("127.0.0.1", 0)
        return server
    server = asyncio.run_coroutine_threadsafe(begin(), loop).result(60)
    port = server._server.sockets[0].getsockname()[1]
    for name, value in {"SERVER_URL": f"http://127.0.0.1:{port}", "TOKEN_ID": "ak-1", "TOKEN_SECRET": "as-1"}.items():
        monkeypatch.setenv(f"MODAL_{name}", value)
    try:
        yield place
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
