"""Tiny targets that vLLM can run, drafters trained on what they say, and wrong readings of a drafter's folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from drafter_tools import Options, shape_of
from safetensors.torch import load_file, save_file
from small_targets import capture
from tiny import VOCAB_SIZE, tiny_target, tiny_tokenizer
from transformers import AutoModelForCausalLM

from spectrain.config.drafter_schema import AutoregressiveConfig, DrafterConfig
from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.data.packing import pack_batch
from spectrain.data.vocab import DraftVocab, full_vocab
from spectrain.decoding.loop import DecodingSettings, GenerationResult, Prompt, speculative_generate
from spectrain.drafters.autoregressive.eagle3 import Eagle3
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.drafter_folder import save_drafter
from spectrain.drafters.layers import LayerShape
from spectrain.drafters.registry import find_method
from spectrain.drafters.serving_config import read_serving_config
from spectrain.engines.vllm.args import engine_args
from spectrain.engines.vllm.process import completion_of
from spectrain.engines.vllm.requests import Completion, ReportedRound, placed_rounds
from spectrain.evaluation.parity import DecodedPrompt, ParityReport
from spectrain.target.families import head_math
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel
from spectrain.target.spec import TargetSpec

DRAFTS, ANSWER, LAYERS = 3, 24, 7
# Wide enough for vLLM's kernels: heads of 32. Seven layers, so that vLLM's default taps are three.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": LAYERS,
}
FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
        "sliding_window": 16,
        "global_head_dim": 64,
        "num_kv_shared_layers": 0,
    }
}
ENGINE = EngineConfig(name="vllm", max_num_seqs=8)
TARGET = TargetConfig(max_length=128)


@dataclass(frozen=True)
class Family:
    """A target with prompts, what it says greedily, and its states."""

    folder: Path
    model: TargetModel

    @classmethod
    def make(cls, family: str, folder: Path) -> Family:
        tiny_target(family, folder, **SHAPE, **FAMILY_SHAPES.get(family, {}))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return cls(
            folder, TargetModel(model, tiny_tokenizer(), TargetSpec.from_config(model.config), head_math(model.config))
        )

    @cached_property
    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(4, 12, (12,), generator=generator).tolist()
        return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]

    @cached_property
    def plain(self) -> list[GenerationResult]:
        prompts = [Prompt(prompt, ANSWER) for prompt in self.prompts]
        return speculative_generate(self.model, None, prompts, DecodingSettings(eos_ids=self.eos_ids)).results

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return (int(tiny_tokenizer().eos_token_id),)

    @cached_property
    def states(self) -> list[TargetStates]:
        return self.states_of(range(LAYERS + 1))

    def states_of(self, taps: Sequence[int]) -> list[TargetStates]:
        """The answers with these taps."""
        texts = zip(self.prompts, self.plain, strict=True)
        return [
            capture(self.model, prompt, answer.ids, taps, f"d{i}", "train") for i, (prompt, answer) in enumerate(texts)
        ]

    def ours(self, drafter: Drafter, count: int | None = None) -> list[DecodedPrompt]:
        """What our loop decodes from the first ``count`` prompts; None: from all."""
        prompts = [Prompt(prompt, ANSWER) for prompt in self.prompts[:count]]
        settings = DecodingSettings(DRAFTS, eos_ids=self.eos_ids)
        results = speculative_generate(self.model, drafter, prompts, settings).results
        return [DecodedPrompt(prompt.ids, one.ids, one.rounds) for prompt, one in zip(prompts, results, strict=True)]


def train(family: Family, options: Options, steps: int = 35) -> Eagle3:
    """An EAGLE-3 or P-EAGLE drafter that has seen the answers often enough to draft much of them, not all."""
    counts = Counter(token for answer in family.plain for token in answer.ids)
    kept = sorted(token for token, _ in counts.most_common(100))
    vocab = DraftVocab(torch.tensor(kept), VOCAB_SIZE, 0.5) if options.reduced else full_vocab(VOCAB_SIZE)
    rope = {"rope_type": "default", "rope_theta": 100.0}
    layer = LayerShape(options.layer_type, 64, 96, 2, 1, 32, 1e-6, rope, 512)
    shape = shape_of(options, layer, VOCAB_SIZE, len(vocab.ids_D))
    config = DrafterConfig(options.method, autoregressive=AutoregressiveConfig(ttt_steps=DRAFTS))
    drafter = find_method(options.method).build(shape, vocab, config)
    assert isinstance(drafter, Eagle3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(drafter.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else noise / parameter.shape[1] ** 0.5)
    drafter.attach(TargetHead.from_checkpoint(family.folder))
    batch = pack_batch(
        [dataclasses.replace(states, taps=states.taps[:, list(options.taps)]) for states in family.states]
    )
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for _ in range(steps):
        sums = drafter.train_losses(batch)
        (sums.loss / sums.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


def save(family: Family, drafter: Eagle3, folder: Path) -> Path:
    architectures = tuple(family.model.model.config.architectures)
    save_drafter(
        drafter, folder, target=str(family.folder), target_architectures=architectures, num_speculative_tokens=DRAFTS
    )
    return folder


def mutated(folder: Path, into: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a drafter's folder with its configuration and tensors changed."""
    shutil.copytree(folder, into)
    config = json.loads((into / "config.json").read_text())
    tensors = load_file(into / "model.safetensors")
    change(config, tensors)
    (into / "config.json").write_text(json.dumps(config))
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


def job(name: str, family: Family, folder: Path, **speculation: Any) -> dict[str, Any]:
    """One engine of ``parity_rounds.py``. ``speculation``: what it is told of the drafter beside its folder; by default
    as EAGLE-3.
    """
    speculation = {"method": "eagle3"} | speculation | {"model": str(folder), "num_speculative_tokens": DRAFTS}
    extra = {"speculative_config": speculation, "per_request_spec_decode_metrics": "detailed"}
    extra |= {"skip_tokenizer_init": True, "async_scheduling": False, "disable_log_stats": False}
    request = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None, "states": None, "max_tokens": ANSWER}
    return {
        "name": name,
        "args": engine_args(ENGINE, TARGET, family.folder, extra),
        "requests": [
            {**request, "id": str(number), "prompt_ids": prompt, "stop_ids": list(family.eos_ids)}
            for number, prompt in enumerate(family.prompts)
        ],
    }


def served_job(name: str, family: Family, folder: Path, num_drafts: int | None = DRAFTS) -> dict[str, Any]:
    """The same, told of the drafter what ``spectrain serve`` tells it; ``None``: the folder's own number of drafts."""
    asked = job(name, family, folder)
    asked["args"]["speculative_config"] = read_serving_config(str(folder)).speculative_config(num_drafts)
    return asked


def assert_same_rounds(report: ParityReport, least_rounds: int) -> None:
    """Every round of vLLM is ours, but for a near-tie or two."""
    assert report.passed, report.reason()
    assert report.equal + len(report.ties) == report.rounds >= least_rounds
    assert len(report.ties) <= 2


def decoded_by_vllm(family: Family, report: Mapping[str, Any]) -> list[DecodedPrompt]:
    assert "error" not in report, report["error"]
    found = report["completions"]
    return [as_decoded(prompt, completion_of(found[str(number)])) for number, prompt in enumerate(family.prompts)]


def as_decoded(prompt: list[int], completion: Completion) -> DecodedPrompt:
    return DecodedPrompt(prompt, completion.ids, placed_rounds(len(prompt), completion))


def as_rounds(decoded: DecodedPrompt) -> list[ReportedRound]:
    """What a server would report of rounds of ours."""
    return [ReportedRound(len(round_.drafts), round_.accepted, round_.drafts) for round_ in decoded.rounds]
