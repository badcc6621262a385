"""The model card of a published drafter: the metadata that the Hub indexes, and a page for whoever wants to serve it.

Every figure is one that a run recorded, with its interval and its conditions; what was not measured is not there. The
card says how the drafter is served, what it was measured to accept, whether prediction, our loop and vLLM agree, and
what it is not good for. Nothing here reads a file or asks the Hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from spectrain.evaluation.records import EvaluationRecord
from spectrain.evaluation.report.tables import compare_with_simulation, interval_text, number, share_text

MISSING = "not measured"


@dataclass(frozen=True)
class DataSource:
    """Prompts that the drafter learnt from. ``licence``: empty where nobody has said."""

    name: str
    licence: str = ""


@dataclass(frozen=True)
class CardFacts:
    """What a card says; what is empty is left out.

    base_model: Hub id of the target, None where it has none. trained_for: the weights it was trained for, as recorded.
    records: of this drafter. hardware: of each record, by its file name. parity: what the gate found (manifest), None
    where it was not run; verified: whether it has passed for exactly these weights. speculation: vLLM's
    ``speculative_config``. library: whose layout the folder has. replaces_target: it is a tuned head, which is served
    in the target's place. sglang_algorithm: what SGLang calls such a drafter, as ``spectrain convert`` writes it;
    empty: it knows none.
    """

    repo: str
    method: str
    label: str
    base_model: str | None
    trained_for: str
    verified: bool
    parity: Mapping[str, Any] | None
    speculation: Mapping[str, Any]
    max_model_len: int | None = None
    replaces_target: bool = False
    library: str = "speculators"
    sglang_algorithm: str = ""
    license: str | None = None
    languages: Sequence[str] = ()
    datasets: Sequence[str] = ()
    sources: Sequence[DataSource] = ()
    records: Sequence[EvaluationRecord] = ()
    hardware: Mapping[str, str] = field(default_factory=dict)
    shape: Sequence[tuple[str, str]] = ()
    training: Sequence[tuple[str, str]] = ()
    limits: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    plots: Sequence[tuple[str, str]] = ()  # (file, what it shows)


def render_card(facts: CardFacts) -> str:
    """README.md: metadata between dashes, then the page."""
    sections = [
        _introduction(facts),
        _section("Serve it", _serving(facts)),
        _section("Acceptance", _acceptance(facts)),
        _section("Predicted = loop = vLLM", _agreement(facts)),
        _section("Speed", _speed(facts)),
        _section("Drafter", _pairs(facts.shape)),
        _section("Training data", _data(facts)),
        _section("Training", _pairs(facts.training)),
        _section("Limits", "\n".join(f"* {limit}" for limit in facts.limits)),
        _section("Versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items())),
    ]
    return f"---\n{metadata(facts).to_yaml()}\n---\n\n" + "\n\n".join(filter(None, sections)) + "\n"


def metadata(facts: CardFacts) -> ModelCardData:
    """What the Hub indexes. ``library_name`` is that of the layout, by which vLLM's drafters are found there."""
    return ModelCardData(
        base_model=facts.base_model,
        datasets=list(facts.datasets) or None,
        eval_results=[_result(record) for record in _measured(facts)] or None,
        language=list(facts.languages) or None,
        library_name=facts.library,
        license=facts.license,
        model_name=facts.repo.rpartition("/")[2],
        pipeline_tag="text-generation",
        tags=["speculative-decoding", facts.method, "vllm"],
    )


def _result(record: EvaluationRecord) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=record.suite,
        dataset_name=f"{record.suite} ({record.num_prompts} prompts)",
        metric_type="acceptance_length",
        metric_value=round(record.acceptance_length or 0.0, 4),
        metric_name=f"acceptance length, {_conditions(record)}",
    )


def _measured(facts: CardFacts) -> list[EvaluationRecord]:
    return [record for record in facts.records if record.acceptance_length is not None]


def _conditions(record: EvaluationRecord) -> str:
    policy = "" if record.draft_policy == "fixed" else f", policy {record.draft_policy}"
    return (
        f"{record.num_speculative_tokens} drafts, temperature {record.temperature:g}, {record.concurrency} at a time, "
        f"engine {record.engine}{policy}"
    )


# --- sections ------------------------------------------------------------------------------------------------------


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if text else ""


def _introduction(facts: CardFacts) -> str:
    target = facts.base_model or facts.trained_for
    linked = f"[{target}](https://huggingface.co/{target})" if facts.base_model else f"`{target}`"
    lines = [f"# {facts.repo.rpartition('/')[2]}"]
    if not facts.verified:
        lines.append(
            "> **Unverified.** The check that vLLM drafts and accepts exactly what the trainer's own loop does has not "
            "passed for these weights. Figures below that vLLM did not measure itself may not be what a server gives."
        )
    lines.append(
        f"{facts.label} drafter for speculative decoding of {linked}. It proposes tokens, the target verifies them: "
        f"the output stays the target's own, only sooner."
    )
    lines.append(f"Trained for the weights {facts.trained_for}.")
    return "\n\n".join(lines)


def serve_command(facts: CardFacts) -> str:
    """One command with which vLLM serves target and drafter. Of a tuned head the rest of the target has to be linked
    beside it first, which ``spectrain serve`` does.
    """
    if facts.replaces_target:
        return f"spectrain serve drafter.path={facts.repo}"
    length = "" if facts.max_model_len is None else f" --max-model-len {facts.max_model_len}"
    return f"vllm serve {facts.base_model or 'TARGET'}{length} --speculative-config '{json.dumps(facts.speculation)}'"


def _serving(facts: CardFacts) -> str:
    text = f"With vLLM:\n\n```bash\n{serve_command(facts)}\n```"
    if facts.replaces_target:
        text += (
            "\n\nThis repository holds the head, not the target: the command fetches both, links the target's files "
            f"beside the head, and starts `vllm serve` there with `--speculative-config "
            f"'{json.dumps(facts.speculation)}'`."
        )
    if facts.base_model is None:
        text += "\n\n`TARGET`: the folder of the target's weights, which are not on the Hub under a name that is known."
    if facts.sglang_algorithm:
        steps, folder = int(facts.speculation["num_speculative_tokens"]), "drafter-eagle"
        text += (
            "\n\nWith SGLang, which reads EAGLE's layout (this command was not run for this card):\n\n```bash\n"
            f"spectrain convert drafter.path={facts.repo} convert.to=eagle convert.out={folder}\n"
            f"python -m sglang.launch_server --model-path {facts.base_model or 'TARGET'} "
            f"--speculative-algorithm {facts.sglang_algorithm} --speculative-draft-model-path {folder} "
            f"--speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}\n"
            "```"
        )
    return text


def _acceptance(facts: CardFacts) -> str:
    if not _measured(facts):
        return "Not measured: no evaluation of exactly these weights was recorded."
    rows = [
        (
            *(record.suite, f"{record.temperature:g}", record.engine, _drafts(record)),
            f"**{number(record.acceptance_length)}** {_brackets(record.acceptance_length_interval)}",
            " ".join(share_text(share) for share in record.acceptance_per_position),
            f"{record.num_prompts} ({record.rounds:,} rounds)",
        )
        for record in _measured(facts)
    ]
    heads = ("suite", "temperature", "engine", "drafts", "acceptance length τ", "by position", "prompts")
    plots = "".join(f"\n\n![{text}]({file})" for file, text in facts.plots)
    note = (
        "τ: tokens committed by one pass of the target, the bonus token included; in brackets its 95 % bootstrap "
        "interval over prompts. By position: share of rounds in which so many drafts were accepted."
    )
    return f"{_table(heads, rows)}\n\n{note}{plots}"


def _drafts(record: EvaluationRecord) -> str:
    """How many a round, and which of them are verified where it is not all."""
    if record.draft_policy == "fixed":
        return str(record.num_speculative_tokens)
    threshold = "" if record.draft_threshold is None else f" {record.draft_threshold:g}"
    return f"at most {record.num_speculative_tokens}, {record.draft_policy}{threshold}"


def _agreement(facts: CardFacts) -> str:
    rows = list(_agreement_rows(facts))
    text = _table(("suite", "temperature", "drafts", "predicted", "loop", "vLLM"), rows) if rows else ""
    return "\n\n".join(filter(None, [text, _verdict(facts)]))


def _agreement_rows(facts: CardFacts) -> Iterator[tuple[str, ...]]:
    """A line a suite, temperature and number of drafts; figures of one conversation at a time come first."""
    groups: dict[tuple[str, float, int], list[EvaluationRecord]] = {}
    for record in sorted(_measured(facts), key=lambda record: record.concurrency):
        if record.draft_policy == "fixed":
            groups.setdefault((record.suite, record.temperature, record.num_speculative_tokens), []).append(record)
    for (suite, temperature, drafts), records in groups.items():
        loop = next((record for record in records if record.engine == "hf"), None)
        vllm = next((record for record in records if record.engine != "hf"), None)
        simulated = next((r for r in records if r.simulated_acceptance_length is not None), None)
        predicted = MISSING if simulated is None else number(simulated.simulated_acceptance_length, digits=3)
        yield suite, f"{temperature:g}", str(drafts), predicted, _compared(loop), _compared(vllm)


def _compared(record: EvaluationRecord | None) -> str:
    if record is None:
        return MISSING
    verdict = compare_with_simulation(record)
    return number(record.acceptance_length, digits=3) + (f" ({verdict[0]})" if verdict else "")


def _verdict(facts: CardFacts) -> str:
    found = facts.parity
    if found is None:
        return "vLLM's rounds were not compared with ours, round by round, for these weights."
    shares = found.get("acceptance_per_position") or {}
    figures = "; ".join(
        f"{name}: {' '.join(share_text(share) for share in shares[name])}"
        for name in ("loop", "vllm")
        if shares.get(name)
    )
    outcome = "passed" if found["passed"] else "has NOT passed"
    return (
        f"Round by round (vLLM {found.get('vllm', 'of unknown version')}, {found.get('num_speculative_tokens', '?')} "
        f"drafts, greedy): the check {outcome}; of {found.get('rounds', 0):,} rounds {found.get('equal', 0):,} are "
        f"equal token for token, {found.get('near_ties', 0):,} are ties that rounding explains, "
        f"{found.get('different', 0):,} differ." + (f" Accepted by position: {figures}." if figures else "")
    )


def _speed(facts: CardFacts) -> str:
    rows = [
        (
            # In few columns: what is wider than the Hub's page has to be scrolled.
            *(record.suite, f"{record.temperature:g}", record.engine_version or record.engine),
            *(_drafts(record), str(record.concurrency)),
            f"**{number(record.speedup, '×')}** {_brackets(record.speedup_interval)}",
            f"{number(record.baseline_tokens_per_s, digits=1)} → {number(record.output_tokens_per_s, digits=1)}",
            facts.hardware.get(record.file_name(), "not recorded"),
        )
        for record in facts.records
        if record.speedup is not None
    ]
    if not rows:
        return ""
    heads = ("suite", "temperature", "engine", "drafts", "at a time", "speed-up", "tokens/s", "hardware")
    note = "Speed-up over the same engine without speculation, on this hardware alone; another will give another."
    return f"{_table(heads, rows)}\n\n{note}"


def _data(facts: CardFacts) -> str:
    if not facts.sources:
        return ""
    rows = [(source.name, source.licence or "not recorded") for source in facts.sources]
    text = "The target answered these prompts itself; the drafter learnt from its answers."
    return f"{text}\n\n{_table(('prompts', 'licence'), rows)}"


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    return _table(("what", "value"), pairs) if pairs else ""


def _brackets(interval: tuple[float, float] | None) -> str:
    return f"[{interval_text(interval)}]" if interval else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
