"""Rounds of several vLLM engines, one after the other in one process: ``python parity_rounds.py < jobs.json >
rounds.json``.

Importing vLLM takes ten times as long as starting it on a tiny target, so tests that need many pairs of target and
drafter share a process. The engine is built and stepped by the package's own host, as ``VLLMProcess`` does it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import traceback
from typing import Any

from spectrain.engines.vllm import child as vllm_host


class Channel:
    """Gives one job's requests, ends when all are answered."""

    def __init__(self, requests: list[dict[str, Any]]) -> None:
        self.orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        for request in requests:
            self.orders.put({"request": request})
        self.answers: dict[str, dict[str, Any]] = {}
        self._wanted = len(requests)

    def report(self, **content: Any) -> None:
        if "refused" in content:
            raise RuntimeError(content["reason"])
        self.answers |= {answer["id"]: answer for answer in content.get("answers", ())}
        if len(self.answers) == self._wanted:
            self.orders.put(None)


def main() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever vLLM prints is log
    for job in json.load(sys.stdin):
        channel = Channel(job["requests"])
        try:
            vllm_host.serve(channel, {"args": job["args"], "record_rounds": True})  # type: ignore[arg-type]
            result: dict[str, Any] = {"name": job["name"], "answers": channel.answers}
        except Exception:
            result = {"name": job["name"], "error": traceback.format_exc()}
        output.write(json.dumps(result) + "\n")
        output.flush()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
