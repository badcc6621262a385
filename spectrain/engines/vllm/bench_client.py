"""vLLM's own benchmark client (``vllm bench serve``), in a process of its own that takes one measurement after another:
its import takes longer than many measurements.

``python -m spectrain.engines.vllm.bench_client`` is that process: a line of JSON with arguments of the client on
its standard input, a line of JSON in reply when it is done: ``{}``, or ``{"error": …}``.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain import signals
from spectrain.engines.vllm.logs import last_errors, open_log
from spectrain.errors import RunError

_POLL_S = 0.5


@dataclass(frozen=True)
class Load:
    """What is asked of a server, and how much at a time. ``messages``: of each request, as of a chat; ``concurrency``:
    requests under way, where no ``request_rate`` a second is given.
    """

    url: str
    model: str
    messages: Sequence[Sequence[Mapping[str, str]]]
    max_tokens: int
    warmups: int
    concurrency: int | None
    request_rate: float | None
    temperature: float
    top_p: float
    top_k: int
    seed: int

    def arguments(self, prompts: Path, result: Path) -> list[str]:
        """Of ``vllm bench serve``. Chats are sent as they are: the server renders them, as for anybody."""
        # Without a tokenizer the client knows no number of tokens to ask for, and takes 1: the body says it instead.
        body: dict[str, Any] = {"max_completion_tokens": self.max_tokens}
        if self.top_k:
            body["top_k"] = self.top_k
        load = ["--request-rate", f"{self.request_rate:g}"] if self.request_rate is not None else []
        load += ["--max-concurrency", str(self.concurrency)] if self.concurrency is not None else []
        return [
            *("--backend", "openai-chat", "--base-url", self.url, "--endpoint", "/v1/chat/completions"),
            *("--model", self.model, "--skip-tokenizer-init"),
            *("--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"),
            *("--num-prompts", str(len(self.messages)), "--no-oversample", "--disable-shuffle"),
            *("--num-warmups", str(self.warmups), "--temperature", f"{self.temperature:g}", "--seed", str(self.seed)),
            *("--top-p", f"{self.top_p:g}", "--extra-body", json.dumps(body), "--disable-tqdm", *load),
            *("--save-result", "--save-detailed", "--result-dir", str(result.parent), "--result-filename", result.name),
        ]


class BenchClient:
    """The client's process. ``environment``: variables over those of this process; ``log``: gets what it prints."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._results, writing = os.pipe()
        with open_log(log) as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                # -P: a file of the working directory must not hide a package.
                [sys.executable, "-P", "-m", __name__, str(writing)],
                stdin=subprocess.PIPE,  # its end is the sign that we are gone
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                pass_fds=(writing,),
                start_new_session=True,
            )
        os.close(writing)
        self._takes_back = signals.at_end(self._process.kill)

    def measure(self, load: Load, timeout_s: float) -> dict[str, Any]:
        """The client's result. Raises RunError where it fails, says nothing for so long, or a request was not
        answered.
        """
        with tempfile.TemporaryDirectory(prefix="spectrain-bench-") as folder:
            prompts, result = Path(folder) / "prompts.jsonl", Path(folder) / "result.json"
            lines = [json.dumps({"prompt": list(messages)}) + "\n" for messages in load.messages]
            prompts.write_text("".join(lines), encoding="utf-8")
            self._send(json.dumps(load.arguments(prompts, result)) + "\n")
            reply = self._reply(timeout_s)
            if "error" in reply:
                raise RunError(f"vLLM's benchmark client failed ({reply['error'][:300]}); its log is {self._log}")
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        failed = [error for error in found.get("errors", ()) if error]
        if found.get("failed") or failed:
            last = failed[0].strip().splitlines()[-1] if failed else "no reason given"
            raise RunError(
                f"{found.get('failed')} of {len(load.messages)} requests were not answered by {load.url} ({last[:200]})"
            )
        return found

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None

    def _ended(self) -> RunError:
        return RunError(f"vLLM's benchmark client has ended; {last_errors(self._log, self._log_start)}")

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        text, end_s = b"", time.monotonic() + timeout_s
        while not text.endswith(b"\n"):
            if time.monotonic() > end_s:
                raise RunError(
                    f"vLLM's benchmark client was not done in {timeout_s:g} s (engine.request_timeout_s): ask for "
                    "fewer requests (serving.requests)"
                )
            readable, _, _ = select.select([self._results], [], [], _POLL_S)
            if readable:
                part = os.read(self._results, 1 << 16)
                if not part:
                    raise self._ended()
                text += part
        reply: dict[str, Any] = json.loads(text)
        return reply

    def close(self) -> None:
        """End it."""
        self._process.kill()  # what is under way is of no use
        self._process.communicate()
        os.close(self._results)
        self._takes_back()


def main() -> None:
    """The process. Its argument: the descriptor that replies go to."""
    replies = os.fdopen(int(sys.argv[1]), "w")
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as measure

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    for line in sys.stdin:
        try:
            measure(parser.parse_args(json.loads(line)))
            reply = {}
        except (Exception, SystemExit) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
