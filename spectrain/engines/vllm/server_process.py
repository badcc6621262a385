"""One vLLM server that is started here: its command, its log, whether it is healthy, and its end.

The server listens on a Unix socket in a private folder, not on a port: nobody else can reach it, and no other program
can take its address between the moment it is chosen and the moment vLLM binds it. A guard (``guard.py``) sits between
us and the server, so that all its processes end with ours, however ours ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from spectrain import signals
from spectrain.engines.vllm.args import cli_flags
from spectrain.engines.vllm.guard import guarded
from spectrain.engines.vllm.logs import last_errors, open_log
from spectrain.errors import RunError

_GRACE_S = 15.0  # vLLM ends in a second or two; what takes longer is killed
_POLL_S = 0.2
_LONGEST_SOCKET = 100  # bytes of a path that every system takes for a socket


def server_command(args: Mapping[str, Any]) -> list[str]:
    """The command of vLLM's server with engine arguments ``args``; the address is added when it is started."""
    # By module: the `vllm` command is missing from some builds. -P: a file of the working directory must not hide a
    # package.
    return [
        sys.executable,
        "-P",
        "-m",
        "vllm.entrypoints.openai.api_server",
        *cli_flags(args),
        "--disable-uvicorn-access-log",
    ]


class ServerProcess:
    """A server under guard. ``name``: for messages; ``environment``: variables over those of this process; ``log``:
    gets all its output.

    ``end`` may be called from any thread, at any time; what is being waited for then ends with a RunError.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = {**os.environ, **environment}
        self._guard: subprocess.Popen[bytes] | None = None
        self._socket = Path()
        self._url = "http://localhost"
        self._log_start = 0  # bytes of the log that an earlier start wrote
        self._lock = threading.Lock()
        self._is_over = False
        self._takes_back = lambda: None

    @property
    def socket(self) -> Path:
        """Where the server listens; another one after every start."""
        return self._socket

    def start(self) -> None:
        """Start it, and return at once. The log of an earlier start is kept. Raises RunError after ``end``."""
        with self._lock:
            if self._is_over:
                raise RunError(f"{self.name} is being stopped")
            self._start()
            self._takes_back()
            self._takes_back = signals.at_end(self._hurry)

    def _start(self) -> None:
        with open_log(self.log) as log:
            folder = _private_folder()
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                guarded([*self._command, *self._address(folder)], _GRACE_S, scratch=folder),
                stdin=subprocess.PIPE,  # its end is the guard's sign that we are gone
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for us; we stop the server in order
            )

    def _address(self, folder: Path) -> list[str]:
        """Where it is told to listen; ``folder``: its own, private, removed when it has ended."""
        self._socket = folder / "vllm.sock"
        return ["--uds", str(self._socket)]

    def _transport(self) -> httpx2.HTTPTransport:
        return httpx2.HTTPTransport(uds=str(self._socket))

    @property
    def exit_code(self) -> int | None:
        """None while the server runs."""
        return None if self._guard is None else self._guard.poll()

    @property
    def is_over(self) -> bool:
        """Whether it was told to end, for good."""
        return self._is_over

    def wait_ready(self, end_s: float) -> None:
        """Wait until it serves, until ``end_s`` of the monotonic clock. Raises RunError, with the log's last errors, if
        it does not.
        """
        with httpx2.Client(transport=self._transport(), base_url=self._url, timeout=5.0) as client:
            while not self._is_ready(client):
                if self._is_over:
                    raise RunError(f"{self.name} is being stopped")
                if self.exit_code is not None:
                    raise RunError(
                        f"{self.name} ended before it was ready (exit code {self.exit_code}); {self.last_errors()}"
                    )
                if time.monotonic() > end_s:
                    raise RunError(
                        f"{self.name} was not ready in time: raise engine.startup_timeout_s; {self.last_errors()}"
                    )
                time.sleep(_POLL_S)

    def _is_ready(self, client: httpx2.Client) -> bool:
        try:
            return client.get("/health").status_code == 200
        except httpx2.TransportError:
            return False

    def last_errors(self) -> str:
        """What the log says of its last start; see ``logs.last_errors``."""
        return last_errors(self.log, self._log_start)

    def restart(self, timeout_s: float) -> None:
        """End what is left of it, start it again and wait until it serves. Raises RunError as ``wait_ready`` does."""
        self._stop()
        self.start()
        self.wait_ready(time.monotonic() + timeout_s)

    def end(self) -> None:
        """Tell all its processes to end, for good, and return at once."""
        with self._lock:
            self._is_over = True
            self._tell_end()

    def stop(self) -> None:
        """``end``, and wait for it. Safe to call twice."""
        self.end()
        self._stop()
        self._takes_back()

    def _hurry(self) -> None:
        """``stop``, in a second or so."""
        self.end()
        if self._guard is not None:
            self._guard.terminate()
            self._guard.wait()

    def _tell_end(self) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()

    def _stop(self) -> None:
        guard = self._guard
        if guard is None:
            return
        self._tell_end()
        try:
            guard.wait(_GRACE_S + 15.0)
        except subprocess.TimeoutExpired:
            guard.kill()  # processes that no signal ends, say in a driver: nothing more can be done
            guard.wait()


class PortServer(ServerProcess):
    """A server at a port of this machine, for clients that know no sockets in folders. Another program may take the
    port before vLLM does: vLLM says so, and ends.
    """

    @property
    def url(self) -> str:
        """Where it listens; another one after every start."""
        return self._url

    def _address(self, folder: Path) -> list[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        return ["--host", "127.0.0.1", "--port", str(port)]

    def _transport(self) -> httpx2.HTTPTransport:
        return httpx2.HTTPTransport()


def _private_folder() -> Path:
    """A new folder that only this user can enter, with a path short enough for a socket in it."""
    folder = Path(tempfile.mkdtemp(prefix="spectrain-"))
    if len(os.fsencode(folder)) <= _LONGEST_SOCKET - len("/vllm.sock"):
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="spectrain-", dir="/tmp"))
