"""A process that runs vLLM engines one after the other (``parity_rounds.py``) and tells the rounds of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_tools import vllm_engine, vllm_environment

from spectrain.engines.vllm.args import environment


class RoundsProcess:
    """Started with the first jobs; a context manager. ``variables``: of the process."""

    def __init__(self, log: Path, **variables: str) -> None:
        self._log = log
        self._environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            **environment(vllm_engine(environment=vllm_environment(**variables))),
        }
        self._process: subprocess.Popen[str] | None = None

    def run(self, jobs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Name -> what the engine of that name reported. The jobs are those of ``parity_tools.job``."""
        if self._process is None:
            with self._log.open("w") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, str(Path(__file__).parent / "parity_rounds.py")],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=self._environment,
                    text=True,
                )
        assert self._process.stdin is not None and self._process.stdout is not None
        reports = {}
        for job in jobs:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            assert line, self._log.read_text()[-3000:]
            report = json.loads(line)
            reports[report["name"]] = report
        return reports

    def __enter__(self) -> RoundsProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.communicate()
