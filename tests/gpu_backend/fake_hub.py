"""A hub on this machine: a few repositories, served as the real one serves them."""

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import HfApi, constants

from gpu_backend.sources import hub

REVISION = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Repositories by name, each a dict of file contents; ``status`` overrides an answer."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = {}
        self.status = None
        self.error_code = ""
        self.fetched = []
        self.cut_after = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, body):
        if self.server.status is not None:
            return self._send(
                self.server.status, b"{}", body, {"X-Error-Code": self.server.error_code}
            )
        path = self.path.partition("?")[0].removeprefix("/")
        if path.startswith("api/models/"):
            return self._info("/".join(path.split("/")[2:4]), body)
        owner, name, _, _, file = path.split("/", 4)
        content = self.server.repositories[f"{owner}/{name}"].get(file)
        if content is None:
            return self._send(404, b"", body, {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(content).hexdigest()
        if body:
            self.server.fetched.append(file)
        return self._send(200, content, body, {"ETag": f'"{etag}"', "X-Repo-Commit": REVISION})

    def _info(self, repository, body):
        files = self.server.repositories.get(repository)
        if files is None:
            return self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        info = {"id": repository, "sha": REVISION, "siblings": siblings}
        return self._send(200, json.dumps(info).encode(), body, {})

    def _send(self, status, content, body, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextlib.contextmanager
def running_hub(monkeypatch, cache):
    """Serve, and point the hub's client and cache at it."""
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "make_api", lambda: HfApi(endpoint=server.url, token=False))
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def repository(folder):
    """Files of a model directory, and one that nobody needs."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return {"README.md": b"long", **files}
