"""``VLLMClient`` on this machine: a vLLM in a child process (``child.py``), spoken to through pipes.

Why not always a server, as with ``engine=vllm_server``: the parity gate needs the ids of every drafted token, which no
server tells (vLLM's scheduler in the same process as our code does), and the child, which builds no web server and
loads no tokenizer, is ready much sooner.

Why a process of its own: vLLM's threads, signal handlers and device contexts do not go well with a trainer's, and a
crash in there must end as a sentence of ours. The child leads a process group, so that vLLM's workers end with it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spectrain import signals
from spectrain.config.schema import EngineConfig
from spectrain.console import say
from spectrain.engines.vllm.args import environment, is_cpu_build
from spectrain.engines.vllm.logs import last_errors, open_log
from spectrain.engines.vllm.requests import Completion, ReportedRound, Request, VLLMClient
from spectrain.errors import RunError

_CLOSE_S = 20.0
_POLL_S = 0.2
_PATIENCE_S = 20.0  # of starting, before a line says what is being waited for


class VLLMProcess(VLLMClient):
    """vLLM with ``args`` (see ``args.engine_args``), its output in ``log``. Ready to use when constructed.

    record_rounds: ``Completion.rounds`` hold the ids proposed in each round; without it, their numbers. The engine then
    runs in the child itself, step by step, which costs throughput.

    Raises ``RunError``, with the log's last error lines, if vLLM does not come up within ``engine.startup_timeout_s``.
    """

    def __init__(self, config: EngineConfig, args: Mapping[str, Any], log: Path, record_rounds: bool = False) -> None:
        self.log = log
        self._reports: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._closed = False
        args = _completed(args, record_rounds)
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if record_rounds or is_cpu_build() else {}
        with open_log(log) as output:
            self._log_start = output.tell()
            reading, writing = os.pipe()
            self._process = subprocess.Popen(
                # -P: a folder of the working directory must not hide a package.
                [sys.executable, "-P", "-m", "spectrain.engines.vllm.child", str(writing)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(writing,),
                env={**os.environ, **variables, **environment(config)},
                start_new_session=True,
                text=True,
                encoding="utf-8",
            )
        self._takes_back = signals.at_end(self._kill_group)
        os.close(writing)
        threading.Thread(target=self._read, args=(reading,), daemon=True).start()
        try:
            self._send({"args": args, "record_rounds": record_rounds})
            ready = self._wait_until_ready(config.startup_timeout_s)
        except BaseException:
            self._kill_group()  # at once: there is nothing to finish, and whoever pressed Ctrl-C does not want to wait
            self.close()
            raise
        # A few more than run together, so that none of vLLM's slots is empty while a completion is on its way here.
        self._capacity = ready["max_num_seqs"] * 5 // 4 + 1

    @property
    def capacity(self) -> int:
        return self._capacity

    def submit(self, request: Request) -> None:
        self._send({"request": asdict(request)})

    def collect(self, timeout_s: float) -> list[Completion]:
        until = time.monotonic() + timeout_s
        found: list[Completion] = []
        while True:
            try:
                report = self._reports.get(timeout=0 if found else max(0.0, min(_POLL_S, until - time.monotonic())))
            except queue.Empty:
                if self._process.poll() is not None and self._reports.empty():
                    raise self._died("ended while it was at work") from None
                if found or time.monotonic() >= until:
                    return found
                continue
            if report is None:
                raise self._died("ended while it was at work")
            if "refused" in report:
                raise RunError(f"vLLM refused request {report['refused']}: {report['reason']}")
            found += [completion_of(reported) for reported in report["completions"]]

    def close(self) -> None:
        """End the child: it is asked to, and killed if it does not."""
        if self._closed:
            return
        self._closed = True
        self._takes_back()
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self._kill_group()

    def _kill_group(self) -> None:
        # The group's number is the leader's, and nobody may be left in it.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order, separators=(",", ":")) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # a broken or closed pipe
            raise self._died("cannot be reached") from None

    def _read(self, descriptor: int) -> None:
        # ValueError: half a line; it was killed while writing.
        with os.fdopen(descriptor, encoding="utf-8") as reports, suppress(ValueError):
            for line in reports:
                self._reports.put(json.loads(line))
        self._reports.put(None)

    def _wait_until_ready(self, timeout_s: float) -> dict[str, Any]:
        start_s, told = time.monotonic(), False
        while time.monotonic() - start_s < timeout_s:
            with suppress(queue.Empty):
                report = self._reports.get(timeout=_POLL_S)
                if report is None:
                    break
                return report
            if self._process.poll() is not None and self._reports.empty():
                break
            if not told and time.monotonic() - start_s > _PATIENCE_S:
                say(f"vLLM is starting; its output goes to {self.log}")
                told = True
        else:
            raise self._died(f"is not ready after engine.startup_timeout_s={timeout_s:.0f} s")
        raise self._died("did not start")

    def _died(self, what: str) -> RunError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # its last words reach the log before it is gone
        code = self._process.poll()
        how = "" if code is None else f" (killed by {_signal_name(-code)})" if code < 0 else f" (exit code {code})"
        return RunError(f"vLLM {what}{how}; {last_errors(self.log, self._log_start)}")


def _completed(args: Mapping[str, Any], record_rounds: bool) -> dict[str, Any]:
    """``args`` with what this client rests on: no tokenizer, and the rounds of each request where there is
    speculation.
    """
    speculation = args.get("speculative_config") or {}
    drafts = bool(speculation) and speculation.get("method") != "extract_hidden_states"
    ours: dict[str, Any] = {"skip_tokenizer_init": True, "disable_log_stats": not drafts}
    if drafts:
        ours["per_request_spec_decode_metrics"] = "detailed"
    if record_rounds:
        ours["async_scheduling"] = False
    return {**ours, **args}


def completion_of(reported: Mapping[str, Any]) -> Completion:
    """From what ``child.completion`` reports."""
    rounds = [ReportedRound(drafted, accepted, tuple(drafts)) for drafted, accepted, drafts in reported["rounds"]]
    return Completion(**{**reported, "rounds": rounds})


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
