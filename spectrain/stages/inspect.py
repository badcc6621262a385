"""``spectrain inspect responses``: look at what was generated, with the supervised tokens marked (see ``data/inspect.py``)."""

from __future__ import annotations

from spectrain.config import SpectrainConfig
from spectrain.console import stdout
from spectrain.data.inspect import inspect_responses
from spectrain.data.responses import ResponseStore
from spectrain.errors import InputError
from spectrain.run_dir import RunDir


def inspect(config: SpectrainConfig, limit: int, split: str | None = None) -> None:
    """Print the first ``limit`` responses of a run directory. ``split``: train, heldout, or None for both."""
    from transformers import AutoTokenizer

    from spectrain.target.resolve import resolve_target

    run_dir = RunDir(config.run.dir)
    run_dir.check({})
    responses = ResponseStore(run_dir.responses).load()
    if not responses:
        raise InputError(f"run.dir={run_dir.path} holds no responses: run spectrain generate first, or name another run.dir")
    target = resolve_target(config.target)
    run_dir.check({"id": target.id, "revision": target.revision})
    tokenizer = AutoTokenizer.from_pretrained(str(target.folder), local_files_only=True, trust_remote_code=config.target.trust_remote_code)
    inspect_responses(responses, tokenizer, stdout, limit=limit, split=split)
