"""Rounds of many vLLM engines, one after the other in one process: jobs come as JSON lines on standard input, each is
answered by one line.

Importing vLLM takes ten times as long as starting it on a tiny target, so all tests that need pairs of target and
drafter share a process (``rounds_process.py``). The engine is built and stepped by ``child.serve``, as ``VLLMProcess``
has it done.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import traceback
from typing import Any

from spectrain.engines.vllm import child


class Channel:
    """Gives one job's requests, ends when all are completed."""

    def __init__(self, requests: list[dict[str, Any]]) -> None:
        self.orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        for request in requests:
            self.orders.put({"request": request})
        self.completions: dict[str, dict[str, Any]] = {}
        self._wanted = len(requests)

    def report(self, **content: Any) -> None:
        if "refused" in content:
            raise RuntimeError(content["reason"])
        self.completions |= {completion["id"]: completion for completion in content.get("completions", ())}
        if len(self.completions) == self._wanted:
            self.orders.put(None)


def main() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever vLLM prints is log
    for line in sys.stdin:
        job = json.loads(line)
        channel = Channel(job["requests"])
        try:
            child.serve(channel, {"args": job["args"], "record_rounds": True})  # type: ignore[arg-type]
            result: dict[str, Any] = {"name": job["name"], "completions": channel.completions}
        except Exception:
            result = {"name": job["name"], "error": traceback.format_exc()}
        output.write(json.dumps(result) + "\n")
        output.flush()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
