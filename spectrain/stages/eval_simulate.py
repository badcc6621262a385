"""``eval simulate``: what acceptance a drafter would have on the run's stored answers, without decoding.

One teacher-forced pass over the stored hidden states gives the acceptance of every draft, hence of every number of
drafts. Where the store lacks this drafter's taps, or some answers, the target runs over them once more, here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from spectrain.console import ProgressBar, say, stdout
from spectrain.data.hidden_states import INDEX_NAME, HiddenStateSource, TargetStates
from spectrain.data.loss_mask import generated_ranges
from spectrain.data.prompts import Conversation
from spectrain.data.responses import ResponseStore
from spectrain.decoding.scheduler import FIXED
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.drafter_folder import read_method
from spectrain.drafters.serving_config import drafter_digest
from spectrain.errors import InputError
from spectrain.evaluation.records import EvaluationRecord, Interval, read_records
from spectrain.evaluation.report.simulation_plots import simulation_drawings
from spectrain.evaluation.report.tables import interval_text, number, share_text
from spectrain.evaluation.simulation_tables import Figures, SimulatedText, as_json, figures, tables
from spectrain.evaluation.suites import HELDOUT
from spectrain.files import with_digest, write_atomically
from spectrain.stages import capture
from spectrain.stages.answer_suite import load_measured_drafter, simulate_documents
from spectrain.stages.context import Context
from spectrain.target.model import choose_device
from spectrain.training.simulated_acceptance import SimulatedAcceptance

# Of a record, what is written beside the simulation.
_MEASURED = (
    *("engine", "engine_version", "num_speculative_tokens", "num_prompts", "max_new_tokens", "concurrency"),
    *("rounds", "acceptance_length", "acceptance_length_interval", "acceptance_per_position"),
)
_MOST_DRAFTS = 8  # simulated at least, where a drafter sets no limit


def simulate_answers(context: Context) -> float | None:
    """Simulate the held-out answers; writes a file in ``eval/simulation/``. Returns the acceptance length."""
    start_s = time.perf_counter()
    config = context.config
    measured = _measured(context)
    drafter = load_measured_drafter(context, choose_device(config.target.device))
    keys = list(context.asked.heldout_keys())
    conversations = dict(zip(keys, context.prompts.heldout, strict=True))
    store, documents = _states(context, drafter, keys)
    n = config.decoding.num_speculative_tokens
    most = drafter.shape.max_drafts or max(_MOST_DRAFTS, n)
    simulated = simulate_documents(context, drafter, store, documents, most)
    seconds = time.perf_counter() - start_s
    texts = list(_texts(store, documents, simulated, conversations))
    whole = figures("all", [text.rounds for text in texts], n)
    parts = tables(texts, n)
    method = read_method(context.measured_drafter)
    written = {
        "target": context.target.id,
        "target_revision": context.target.revision,
        "drafter": str(context.measured_drafter),
        "drafter_digest": drafter_digest(context.measured_drafter),
        "method": method,
        "num_speculative_tokens": n,
        "temperature": config.decoding.temperature,
        "proposal_policy": config.decoding.proposal_policy,
        "seconds": round(seconds, 3),
        "all": asdict(whole),
        "acceptance_length_by_n": simulated.length_by_n,
        "parts": as_json(parts),
        "measured": [{name: getattr(record, name) for name in _MEASURED} for record in measured],
    }
    file = context.run_dir.eval / "simulation" / f"{method}-n{n}-t{config.decoding.temperature:g}.json"
    write_atomically(file, json.dumps(with_digest(written), indent=2, ensure_ascii=False) + "\n", "a simulation")
    for drawing in simulation_drawings(method, whole, parts, simulated.length_by_n):
        drawing.write(file.parent)
    stdout.print(_table(whole, parts, simulated.length_by_n, measured))
    say(f"simulate: {len(texts)} answers in {seconds:.1f} s, {file}")
    return whole.acceptance_length


def _states(context: Context, drafter: Drafter, keys: list[str]) -> tuple[HiddenStateSource, Sequence[int]]:
    """The hidden states of these answers that the drafter reads: stored, or computed now and kept in memory."""
    stored = (context.data_dir.hidden_states / INDEX_NAME).is_file()
    found = capture.open_store(context, drafter.taps, drafter.kv_layers, keys) if stored else None
    if found is not None:
        return found
    store = ResponseStore(context.data_dir.responses)
    known = store.keys()
    missing = [key for key in keys if key not in known]
    if missing or not keys:
        raise InputError(
            f"{store.folder} holds {len(keys) - len(missing)} of the {len(keys)} held-out answers to simulate: run "
            "spectrain generate there first"
        )
    if context.config.engine.name != "hf":
        raise InputError(
            f"{context.data_dir.path} has no hidden states with taps {', '.join(map(str, drafter.taps))}: add "
            "engine=hf, which computes them in memory"
        )
    say(f"simulate: no hidden states with taps {', '.join(map(str, drafter.taps))} are stored: computed now")
    responses = store.load(keys)
    with torch.no_grad(), ProgressBar("capture", total=len(responses), unit="documents") as bar:
        made = {}
        for states in context.engine.capture(
            responses, drafter.taps, context.states_dtype, kv_layers=drafter.kv_layers
        ):
            made[states.key] = states
            bar.advance(1)
    return StatesInMemory([made[response.key] for response in responses]), range(len(responses))


class StatesInMemory:
    """Hidden states that were not stored, as a ``HiddenStateSource``."""

    def __init__(self, documents: Sequence[TargetStates]) -> None:
        self._documents = list(documents)
        self.keys = [states.key for states in documents]
        self.splits = ["heldout" for _ in documents]
        self.lengths = np.array([len(states.input_ids) for states in documents], dtype=np.int64)
        self.loss_counts = np.array([int(states.loss_mask.sum()) for states in documents], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> TargetStates:
        return self._documents[index]

    def as_stored(self, index: int) -> TargetStates:
        return self[index]


def _texts(
    store: HiddenStateSource,
    documents: Sequence[int],
    simulated: SimulatedAcceptance,
    conversations: dict[str, Conversation],
) -> Iterator[SimulatedText]:
    for number_, rounds in zip(documents, simulated.rounds, strict=True):
        states = store[number_]
        starts = tuple(start for start, _ in generated_ranges(states.loss_mask.numpy()))
        asked = conversations.get(states.key.partition("-")[0])
        domain, language = (None, None) if asked is None else (asked.domain, asked.language)
        yield SimulatedText(states.key, domain, language, store.splits[number_], starts, rounds)


def _measured(context: Context) -> list[EvaluationRecord]:
    """What decoding gave with this drafter on held-out prompts of this run, wherever it ran, as it is simulated."""
    decoding, name = context.config.decoding, context.measured_drafter_name
    found = [*read_records(context.run_dir.eval), *read_records(context.run_dir.eval / "sweep")]
    conditions = (decoding.temperature, decoding.top_p, decoding.top_k, decoding.proposal_policy)
    return [
        record
        for record in found
        if (record.drafter, record.suite, record.draft_policy) == (name, HELDOUT, FIXED)
        and (record.temperature, record.top_p, record.top_k, record.proposal_policy) == conditions
    ]


def _table(
    whole: Figures, parts: dict[str, list[Figures]], by_n: Sequence[float], measured: Sequence[EvaluationRecord]
) -> Group:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "rounds", "acceptance length", "by position"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row(*_cells(whole), style="bold")
    for name, lines in parts.items():
        if len(lines) > 1:
            table.add_section()
            table.add_row(Text(name, style="dim"), "", "", "")
            for line in lines:
                table.add_row(*_cells(line))
    if measured:
        table.add_section()
        table.add_row(Text("measured by decoding", style="dim"), "", "", "")
    for record in measured:
        table.add_row(
            f"{record.engine}, n = {record.num_speculative_tokens}, {record.num_prompts} prompts",
            f"{record.rounds:,}",
            f"{number(record.acceptance_length)}{_bracketed(record.acceptance_length_interval)}",
            " ".join(map(share_text, record.acceptance_per_position)),
        )
    lengths = "  ".join(f"{n}: {number(length)}" for n, length in enumerate(by_n, start=1))
    return Group(table, Text(f"acceptance length by number of drafts  {lengths}"))


def _cells(line: Figures) -> tuple[str, str, str, str]:
    return (
        line.name,
        f"{line.rounds:,}",
        f"{number(line.acceptance_length)}{_bracketed(line.interval)}",
        " ".join(map(share_text, line.acceptance_per_position)),
    )


def _bracketed(interval: Interval | None) -> str:
    return f" ({interval_text(interval)})" if interval else ""
