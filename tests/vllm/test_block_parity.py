"""Block drafters in the real vLLM: it drafts, and accepts, what our loop does, round by round.

DFlash runs on vLLM's first model runner; DSpark needs the second, which a CPU runs through Triton's interpreter,
slowly: few rounds there. DFlash2 has a kernel that the interpreter cannot run: its arithmetic is held against a
reference implementation (``test_block_decode.py``), and its parts here against the functions that vLLM has for a
machine without a GPU.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from block_tools import DFLASH2, random_block_drafter
from drafter_tools import HIDDEN, VOCAB
from parity_tools import Family, as_decoded, assert_same_rounds, job
from rounds_process import RoundsProcess
from tiny import VOCAB_SIZE

from spectrain.config.drafter_schema import BlockConfig, DrafterConfig, DSparkConfig
from spectrain.data.packing import pack_batch
from spectrain.data.vocab import DraftVocab, full_vocab
from spectrain.decoding.loop import DecodingSettings, Prompt, speculative_generate
from spectrain.drafters.block.block_drafter import BlockDrafter
from spectrain.drafters.build import build_drafter
from spectrain.drafters.drafter_folder import load_drafter, save_drafter
from spectrain.engines.vllm.process import completion_of
from spectrain.evaluation.parity import DecodedPrompt, compare
from spectrain.target.head import TargetHead

N = 3
DFLASH = {
    "full": ("llama", DrafterConfig("dflash", taps=(1, 3, 4, 6, 7), num_layers=2, block=BlockConfig(block_size=4))),
    "reduced, shorter block": (
        "qwen3",
        DrafterConfig("dflash", taps=(0, 7), num_layers=1, draft_vocab_size=100, block=BlockConfig(block_size=6)),
    ),
    "window, causal": (
        "qwen3",
        DrafterConfig("dflash", taps=(2, 5), num_layers=2, block=BlockConfig(block_size=4, sliding_window=8)),
    ),
}
DSPARK = {
    "from the anchor": (
        "llama",
        DrafterConfig(
            "dspark", taps=(1, 4, 6), num_layers=2, block=BlockConfig(block_size=3), dspark=DSparkConfig(markov_rank=16)
        ),
    ),
    "from the masks, reduced": (
        "qwen3",
        DrafterConfig(
            "dspark",
            taps=(3, 6),
            draft_vocab_size=100,
            block=BlockConfig(block_size=4),
            dspark=DSparkConfig(markov_rank=16, sample_from_anchor=False, confidence=False),
        ),
    ),
}


@dataclass
class Drafted:
    """What vLLM made of some prompts, and our own loop."""

    family: Family
    drafter: BlockDrafter
    report: dict[str, Any]
    answer: int
    prompts: list[list[int]]

    def ours(self) -> list[DecodedPrompt]:
        family = self.family
        prompts = [Prompt(prompt, self.answer) for prompt in self.prompts]
        settings = DecodingSettings(N, eos_ids=family.eos_ids)
        results = speculative_generate(family.model, self.drafter, prompts, settings).results
        return [DecodedPrompt(prompt.ids, one.ids, one.rounds) for prompt, one in zip(prompts, results, strict=True)]

    def theirs(self) -> list[DecodedPrompt]:
        assert "error" not in self.report, self.report["error"]
        found = self.report["completions"]
        return [as_decoded(prompt, completion_of(found[str(number)])) for number, prompt in enumerate(self.prompts)]


def trained(family: Family, config: DrafterConfig) -> BlockDrafter:
    """A drafter that has seen the answers often enough to draft much of them, not all."""
    tokens = [token for answer in family.plain for token in answer.ids]
    size = config.draft_vocab_size
    kept = sorted(sorted(set(tokens), key=lambda token: -tokens.count(token))[:size])
    kept = sorted({*kept, *[token for token in range(VOCAB_SIZE) if token not in kept][: (size or 0) - len(kept)]})
    vocab = full_vocab(VOCAB_SIZE) if size is None else DraftVocab(torch.tensor(kept), VOCAB_SIZE, 0.5)
    head = TargetHead.from_checkpoint(family.folder)
    config = replace(config, block=replace(config.block, mask_token_id=2))
    drafter = build_drafter(config, family.model.spec, vocab, head, family.folder)
    assert isinstance(drafter, BlockDrafter)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(drafter.named_parameters()):  # so that every tensor matters
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                1 + 0.3 * noise
                if parameter.ndim == 1 and parameter.shape[0] > 1
                else noise / parameter.shape[-1] ** 0.5
            )
    batch = pack_batch(
        [dataclasses.replace(states, taps=states.taps[:, list(drafter.taps)]) for states in family.states]
    )
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for _ in range(12 if config.method == "dspark" else 40):  # a Markov head learns fast
        sums = drafter.train_losses(batch)
        (sums.loss / sums.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


def draft(
    cases: dict[str, tuple[str, DrafterConfig]], folder: Path, answer: int, prompts: int, process: RoundsProcess
) -> dict[str, Drafted]:
    families = {name: Family.make(name, folder / name) for name, _ in cases.values()}
    drafters, jobs = {}, []
    for number, (name, (family_name, config)) in enumerate(cases.items()):
        family = families[family_name]
        drafters[name] = trained(family, config)
        path = folder / f"drafter-{number}"
        architectures = tuple(family.model.model.config.architectures)
        save_drafter(
            drafters[name],
            path,
            target=str(family.folder),
            target_architectures=architectures,
            num_speculative_tokens=N,
        )
        found = load_drafter(path).attach(drafters[name].head)  # what vLLM reads is what our loop runs
        assert isinstance(found, BlockDrafter)
        drafters[name] = found
        asked = job(name, family, path)
        asked["args"]["speculative_config"] = {"model": str(path), "method": config.method, "num_speculative_tokens": N}
        asked["requests"] = [request | {"max_tokens": answer} for request in asked["requests"][:prompts]]
        jobs.append(asked)
    reports = process.run(jobs)
    return {
        name: Drafted(families[family], drafters[name], reports[name], answer, families[family].prompts[:prompts])
        for name, (family, _) in cases.items()
    }


@pytest.fixture(scope="module")
def dflash(tmp_path_factory: pytest.TempPathFactory, rounds_process: RoundsProcess) -> dict[str, Drafted]:
    return draft(DFLASH, tmp_path_factory.mktemp("dflash"), 24, 12, rounds_process)


@pytest.fixture(scope="module")
def dspark(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Drafted]:
    folder = tmp_path_factory.mktemp("dspark")
    with RoundsProcess(folder / "vllm.log", VLLM_USE_V2_MODEL_RUNNER="1") as process:
        return draft(DSPARK, folder, 14, 5, process)


def check(drafted: Drafted, least_rounds: int) -> None:
    theirs = drafted.theirs()
    report = compare(drafted.family.model, drafted.drafter, drafted.ours(), theirs, N)
    assert_same_rounds(report, least_rounds)
    # The comparison means something: some are accepted, not all, and rounds draft different things.
    assert 0.1 < report.theirs.acceptance_rate < 0.99
    assert len({round_.drafts for one in theirs for round_ in one.rounds}) > report.rounds / 3


@pytest.mark.parametrize("name", DFLASH)
def test_dflash(dflash: dict[str, Drafted], name: str) -> None:
    check(dflash[name], 60)


@pytest.mark.skipif(find_spec("triton") is None, reason="vLLM's second model runner needs triton")
@pytest.mark.parametrize("name", DSPARK)
def test_dspark(dspark: dict[str, Drafted], name: str) -> None:
    check(dspark[name], 8)


@pytest.mark.parametrize("slots", [4, 5])
def test_dflash2_mixes_slots_as_vllm_does(slots: int) -> None:
    from vllm.model_executor.models.qwen3_dflash2 import _grouped_conv

    conv: Any = random_block_drafter(DFLASH2).body.layers[0].mlp_conv
    taken_RBH, given_RBH = torch.randn(
        2, 3, slots, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    with torch.no_grad():
        before_RBH, dynamic = conv.before(taken_RBH)
        found = (before_RBH, conv.after(given_RBH, dynamic))
        coefficients = conv.kernel_projection(taken_RBH.flatten(0, 1)).view(
            3 * slots, 2, conv.shape.kernel_size, conv.num_groups
        )
        for side, source_RBH in enumerate((taken_RBH, given_RBH)):
            shape = (slots, conv.num_groups, conv.shape.group_size, conv.shape.kernel_size)
            expected = _grouped_conv(source_RBH.flatten(0, 1), coefficients[:, side], conv.base_kernel[side], *shape)
            torch.testing.assert_close(found[side].flatten(0, 1), expected, rtol=1e-12, atol=1e-12)


def test_dflash2_scores_candidates_as_vllm_does() -> None:
    from vllm.model_executor.models.qwen3_dflash2 import _score_edges

    selector: Any = random_block_drafter(DFLASH2).body.candidate_selector
    generator, slots, top_k = torch.Generator().manual_seed(0), 4, 6
    hidden_RJH = torch.randn(3, slots, HIDDEN, generator=generator, dtype=torch.float64)
    base_RJN = torch.randn(3, slots, top_k, generator=generator, dtype=torch.float64)
    candidates_RJN = torch.randint(0, VOCAB, base_RJN.shape, generator=generator)
    prev_R, place_R = (
        torch.tensor([1, 4, 9]),
        torch.zeros(3, dtype=torch.long),
    )  # vLLM's first predecessors are all the anchor
    with torch.no_grad():
        tables = (selector.predecessor_codebook, selector.successor_codebook)
        edges = _score_edges(*tables, candidates_RJN, base_RJN, selector.hidden_projection(hidden_RJH), prev_R, top_k)
        for slot in range(slots):
            query = selector.query(prev_R, hidden_RJH[:, slot])
            found_RN = base_RJN[:, slot] + selector.edges(query, candidates_RJN[:, slot])
            torch.testing.assert_close(found_RN, edges[torch.arange(3), slot, place_R], rtol=1e-12, atol=1e-12)
            place_R = found_RN.argmax(-1)
            prev_R = candidates_RJN[:, slot].gather(1, place_R[:, None])[:, 0]
