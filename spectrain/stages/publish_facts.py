"""What a run recorded that a card says: figures of exactly this drafter, shape, training, data, limits."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from safetensors import safe_open

from spectrain.config.schema import SpectrainConfig
from spectrain.drafters.drafter_digests import CONFIG, weight_files
from spectrain.drafters.foreign_checkpoints import standard_config
from spectrain.drafters.hub_drafters import is_hub_id
from spectrain.drafters.registry import find_method
from spectrain.drafters.serving_config import ServingConfig, drafter_digest
from spectrain.evaluation.recommend import recommend
from spectrain.evaluation.records import STAGE_PREFIX, EvaluationRecord, read_record
from spectrain.files import bytes_text
from spectrain.hub.model_card import CardFacts, DataSource
from spectrain.reading import read_json
from spectrain.stages.run_dir import RunDir, versions
from spectrain.target.identity import described

_ASK_S = 10.0
_CARD = "README.md"
# Of the inputs of ``fit``: what another person needs to train such a drafter.
_RECIPE = (
    *("drafter.init", "drafter.loss.weights", "trainer.epochs", "trainer.optimizer", "trainer.learning_rate"),
    *("trainer.packed_length", "trainer.precision", "target.max_length", "target.template_kwargs"),
)


@dataclass(frozen=True)
class Measured:
    """Records of exactly this drafter and of what it was compared with; hardware by a record's file name."""

    all_records: Sequence[EvaluationRecord]
    hardware: Mapping[str, str]

    @property
    def records(self) -> list[EvaluationRecord]:
        return [record for record in self.all_records if record.is_drafter]


def measured(run_dir: RunDir, repo: str) -> Measured:
    """What evaluation measured with exactly the drafter of this run, which is called by its name on the Hub."""
    digest, records, hardware = drafter_digest(run_dir.drafter), dict[str, EvaluationRecord](), dict[str, str]()
    for name, entry in run_dir.manifest()["stages"].items():
        if not name.startswith(STAGE_PREFIX) or entry["inputs"]["fixed"].get("drafter") != digest:
            continue
        outputs = entry.get("outputs", {})
        for file in outputs.get("records") or filter(None, [outputs.get("record")]):
            path = run_dir.path / file
            if not path.is_file():
                continue
            record = read_record(path)
            records[path.name] = replace(record, drafter=repo if record.is_drafter else None)
            if entry.get("hardware"):
                # Servers may be anywhere; what was recorded is the machine that asked them.
                elsewhere = ", or that of the servers" if record.engine == "vllm_server" else ""
                hardware[path.name] = entry["hardware"] + elsewhere
    return Measured(list(records.values()), hardware)


def card_facts(
    config: SpectrainConfig,
    run_dir: RunDir,
    serving: ServingConfig,
    base_model: str | None,
    parity: Mapping[str, Any] | None,
    found: Measured,
    ask_hub: bool,
) -> CardFacts:
    """``ask_hub``: for the target's licence, where nothing here says it."""
    own, method = config.publish, find_method(serving.method)
    target = run_dir.manifest()["target"] or {}
    chosen = recommend(found.records, serving.drafts_step_by_step)
    drafts = serving.num_speculative_tokens if chosen is None else chosen.num_speculative_tokens
    fields = standard_config(read_json(run_dir.drafter / CONFIG), str(run_dir.drafter / CONFIG))
    trained = fields.get("spectrain") or {}
    return CardFacts(
        repo=own.repo,
        method=serving.method,
        label=method.label,
        base_model=base_model,
        trained_for=described(PurePath(str(target.get("id", config.target.name))).name, target.get("revision")),
        verified=parity is not None and bool(parity["passed"]),
        parity=parity,
        speculation=replace(serving, path=own.repo, revision=None).speculative_config(drafts),
        max_model_len=serving.max_model_len,
        library=method.library,
        sglang_algorithm=method.sglang_algorithm(fields),
        license=own.license or _license(config, base_model, ask_hub),
        languages=own.languages,
        datasets=own.datasets or _datasets(run_dir),
        sources=_sources(config, run_dir),
        records=found.records,
        hardware=found.hardware,
        shape=_shape(fields, weight_files(run_dir.drafter)),
        replaces_target=serving.replaces_target,
        training=_training(run_dir),
        limits=_limits(config, trained, found.records),
        versions=(run_dir.manifest()["stages"].get("fit") or {}).get("versions") or versions(),
    )


def _drawn(run_dir: RunDir) -> list[Mapping[str, Any]]:
    """Sets that the prompts were drawn from, as generate recorded them."""
    return [source for source in run_dir.outputs("generate").get("sources") or [] if isinstance(source, Mapping)]


def _datasets(run_dir: RunDir) -> list[str]:
    """Their ids on the Hub."""
    paths = [str(source.get("path", "")) for source in _drawn(run_dir)]
    return [
        path for path in dict.fromkeys(paths) if path.count("/") == 1 and is_hub_id(path) and not os.path.exists(path)
    ]


def _sources(config: SpectrainConfig, run_dir: RunDir) -> list[DataSource]:
    """Prompts by what they are called, never by where they lie."""
    own, drawn = config.publish, _drawn(run_dir)
    if drawn:
        return [
            DataSource(
                described(_called(str(source.get("path", ""))), source.get("revision")),
                str(source.get("license") or ""),
            )
            for source in drawn
        ]
    licences = [*own.data_licenses, *[""] * len(config.data.train)]
    sources = [DataSource(_called(name), licence) for name, licence in zip(config.data.train, licences, strict=False)]
    return [*(DataSource(name, "see the set's own card") for name in own.datasets), *sources]


def _called(name: str) -> str:
    """A file or folder without the place where it lies."""
    return PurePath(name).name if PurePath(name).is_absolute() or name.startswith(("~", ".")) else name


def _shape(fields: Mapping[str, Any], weights: Sequence[Path]) -> list[tuple[str, str]]:
    """``fields``: of a drafter's configuration as the speculators layout has it, where a kind need not have layers."""
    layer = fields.get("transformer_layer_config") or {}
    method = find_method(str(fields["speculators_model_type"]))
    vocabulary, whole = fields.get("draft_vocab_size"), layer.get("vocab_size")
    share = "" if vocabulary == whole else f" of the target's {whole:,}"
    layers = f"{layer.get('num_hidden_layers')} of type {layer.get('model_type')}"
    return [
        ("method", method.label),
        *([("layers", layers)] if "num_hidden_layers" in layer else []),
        ("taps (auxiliary hidden-state layers)", ", ".join(map(str, fields.get(method.taps_field) or ())) or "none"),
        ("draft vocabulary", f"{vocabulary:,}{share}" if vocabulary else "the target's"),
        ("weights", f"{bytes_text(sum(file.stat().st_size for file in weights))}, {_stored_as(weights)}"),
    ]


def _stored_as(weights: Sequence[Path]) -> str:
    """Type of the largest tensor: a configuration may name the one that was trained in."""
    sizes: dict[str, int] = {}
    for file in weights:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, which is no mapping
                part = tensors.get_slice(name)
                kind = str(part.get_dtype())
                sizes[kind] = max(sizes.get(kind, 0), math.prod(part.get_shape()))
    found = max(sizes, key=sizes.__getitem__)
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(found, found)


def _training(run_dir: RunDir) -> list[tuple[str, str]]:
    generated, fitted = run_dir.outputs("generate"), run_dir.outputs("fit")
    entry = run_dir.manifest()["stages"]["fit"]
    pairs: list[tuple[str, str]] = []
    if "generated_tokens" in generated:
        answers = f"{generated.get('responses', 0):,} answers of the target itself"
        pairs.append(("trained on", f"{generated['generated_tokens']:,} tokens of {answers}"))
    if "steps" in fitted:
        pairs.append(("steps", f"{fitted['steps']:,}, the best after {fitted['step']:,}"))
    if fitted.get("simulated_acceptance_length"):
        pairs.append(("simulated acceptance length on held-out text", f"{fitted['simulated_acceptance_length']:.3f}"))
    fixed = entry["inputs"]["fixed"]
    pairs += [(name, f"`{fixed[name]}`") for name in _RECIPE if fixed.get(name) is not None]
    return pairs


def _limits(config: SpectrainConfig, trained: Mapping[str, Any], records: Sequence[EvaluationRecord]) -> list[str]:
    suites = sorted({record.suite for record in records})
    temperatures = sorted({record.temperature for record in records})
    limits = []
    if suites:
        limits.append(
            f"Measured on {', '.join(suites)} at temperature {', '.join(f'{t:g}' for t in temperatures)} alone: other "
            f"text and other sampling are accepted less or more."
        )
    if all(record.engine == "hf" for record in records):
        limits.append("No figure was measured by vLLM: those of engine hf are of the trainer's own lossless loop.")
    limits.append(
        f"Trained on documents of up to {config.target.max_length:,} tokens; what is accepted further on was not "
        f"measured."
    )
    if "coverage" in trained and trained["coverage"] < 1:
        limits.append(f"Its draft vocabulary has {trained['coverage']:.2%} of the held-out generated tokens.")
    limits.append("It fits this target alone: further training of the target makes it accept less.")
    return limits


# --- licence -------------------------------------------------------------------------------------------------------


def _license(config: SpectrainConfig, base_model: str | None, ask_hub: bool) -> str | None:
    """The target's, by its card: in its folder, in the Hub's cache, or on the Hub."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    folder = Path(config.target.path).expanduser() / _CARD
    cached = None if base_model is None else try_to_load_from_cache(base_model, _CARD)
    for path in (folder, cached):
        if isinstance(path, str | Path) and Path(path).is_file():
            return ModelCard.load(path).data.license
    if not ask_hub or base_model is None:
        return None
    from huggingface_hub import HfApi

    try:
        card = HfApi().model_info(base_model, timeout=_ASK_S).card_data
    except Exception:  # of the network and the Hub; the card then has no licence, as if nobody knew
        return None
    return None if card is None else card.license
