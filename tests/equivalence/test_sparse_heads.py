"""DeepSeek-V3.2's head, whose attention reads the keys that an indexer chooses: up to as many tokens as it chooses keys
these are all of them, which is what is computed and trained; a longer text is refused, wherever it comes from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_tools import packed, students
from mtp_tools import KEPT, MtpReference, MtpTarget, mtp_target, taught_target
from quantised_targets import quantise
from safetensors.torch import load_file

from spectrain import cli
from spectrain.decoding.loop import DecodingSettings, Prompt, speculative_generate
from spectrain.decoding.proposers import Observation, read_hidden
from spectrain.decoding.sampling import GREEDY
from spectrain.drafters.autoregressive.mtp import Mtp
from spectrain.drafters.drafter_folder import load_drafter, save_drafter
from spectrain.drafters.overlay import TUNED_HEAD
from spectrain.errors import InputError
from spectrain.target.checkpoint import CheckpointReader

TOPK = 6
REFUSED = rf"beyond {TOPK} \(index_topk\).*set target\.max_length={TOPK}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> MtpTarget:
    folder = mtp_target("deepseek_v32", tmp_path_factory.mktemp("v32") / "t", index_topk=TOPK)
    return MtpTarget("deepseek_v32", folder)


def first_draft(drafter: Mtp, target: MtpTarget, length: int) -> tuple[int, Any]:
    """What is drafted behind a text of so many tokens, and by transformers' layer with its indexer."""
    states, cache = target.document("0" * length, 1), drafter.new_cache(1)
    ids, last = states.input_ids.long()[None], length - 1
    hidden = read_hidden(drafter, drafter.head, states.last_hidden[:last])[None]
    drafter.observe(cache, Observation(ids[:, :last], torch.tensor([last]), last_hidden_BTH=hidden))
    reference = MtpReference(target).chain(ids[0].tolist(), states.last_hidden, 1)
    return int(drafter.propose(cache, ids[0, -1:], 1, GREEDY).ids), reference


def test_up_to_as_many_tokens_as_keys_are_chosen_it_is_the_models_own_layer(target: MtpTarget) -> None:
    draft, reference = first_draft(target.drafter(), target, TOPK + 1)  # its last column reads TOPK keys
    assert [draft] == reference.tokens
    full = target.document("0" + "1" * (TOPK - 1), 2)
    found = students(target.drafter(1), packed([full]))
    for t in range(TOPK - 2):
        chain = MtpReference(target).chain(full.input_ids[: t + 2].tolist(), full.last_hidden, 1)
        torch.testing.assert_close(found[t, 0], chain.normed[0], rtol=1e-5, atol=1e-6)


def test_beyond_them_the_indexer_matters(target: MtpTarget) -> None:
    """So what is refused below is no formality: with one key fewer the layer computes something else."""
    states, reference = target.document("0" * (TOPK + 1), 1), MtpReference(target)
    ids = states.input_ids.tolist()
    dense = reference.chain(ids, states.last_hidden, 1).normed[0]
    reference.layer.self_attn.indexer.index_topk = TOPK - 1
    assert not torch.allclose(dense, reference.chain(ids, states.last_hidden, 1).normed[0], atol=1e-3)


def test_a_longer_text_is_refused(target: MtpTarget) -> None:
    drafter = target.drafter(1)
    with pytest.raises(InputError, match=rf"a text of {TOPK + 1} tokens: {REFUSED}"):
        drafter.train_losses(packed([target.document("0111", 3), target.document("0" + "1" * TOPK, 3)]))
    with pytest.raises(InputError, match=REFUSED):
        first_draft(drafter, target, TOPK + 2)
    prompt = target.document("000", 4).input_ids.tolist()
    assert (
        len(speculative_generate(target.model, drafter, [Prompt(prompt, 3)], DecodingSettings(3)).results[0].ids) == 3
    )
    with pytest.raises(InputError, match=REFUSED):
        speculative_generate(target.model, drafter, [Prompt(prompt, 12)], DecodingSettings(3))


def test_a_quantised_heads_indexer_stays_quantised(target: MtpTarget, tmp_path: Path) -> None:
    """As DeepSeek's own checkpoint has it, in fp8: the tuned modules are left unquantised, the indexer's are not."""
    folder = quantise("fp8 block", target.folder, tmp_path / "q")
    quantised = MtpTarget("deepseek_v32", folder, torch.float32)
    made = tmp_path / "drafter"
    save_drafter(
        quantised.drafter(),
        made,
        target="t",
        target_architectures=quantised.spec.architectures,
        num_speculative_tokens=2,
    )
    own, reader = load_file(folder / "model.safetensors"), CheckpointReader(made)
    indexer = [name for name in own if name.startswith("model.layers.4.") and KEPT in name]
    assert any(name.endswith("wq_b.weight_scale_inv") for name in indexer)
    assert all(torch.equal(reader.get(name), own[name]) for name in indexer)
    left = json.loads((made / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.4.self_attn.q_a_proj" in left and not [name for name in left if "indexer" in name]
    assert {"model.layers.4.mlp.experts.3.down_proj", "model.layers.4.eh_proj"} <= {*left}
    assert load_file(made / TUNED_HEAD)["model.layers.4.self_attn.q_a_proj.weight"].dtype == torch.bfloat16
    load_drafter(made)


@pytest.mark.slow
def test_it_is_tuned_measured_and_written_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = tmp_path / "run", tmp_path / "target"
    taught_target("deepseek_v32", folder, steps=60, index_topk=128, num_hidden_layers=2)
    for name, numbers in (("train", range(40, 52)), ("heldout", range(60, 62))):
        lines = [json.dumps({"turns": [f"Tell me about number {number}."]}) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    asked = ["recipe=mtp_smoke", "target.tiny=null", f"target.path={folder}", "target.name=v32", f"run.dir={run}"]
    asked += ["data=jsonl", f"data.train={tmp_path / 'train.jsonl'}", f"data.heldout={tmp_path / 'heldout.jsonl'}"]
    asked += ["suite.baselines=[]", "trainer.epochs=20", "trainer.learning_rate=1e-2"]
    assert cli.main(["run", *asked, "target.max_length=256"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "target.max_length=256: beyond 128 tokens (index_topk)" in said and "set target.max_length=128" in said
    assert cli.main(["run", *asked, "target.max_length=128"]) == 0
    tuned, untuned = (
        json.loads((run / "eval" / f"heldout-hf-{method}-n3-t0.json").read_text()) for method in ("mtp", "mtp-untuned")
    )
    assert tuned["output_identical"] is not False and untuned["output_identical"] is not False
    assert tuned["acceptance_length"] > 1.2 > untuned["acceptance_length"]
    assert tuned["simulated_acceptance_length"] == pytest.approx(tuned["acceptance_length"], abs=5e-4)
    own, written = load_file(folder / "model.safetensors"), load_file(run / "drafter" / TUNED_HEAD)
    assert {*written} == {name for name in own if name.startswith("model.layers.2.") and KEPT not in name}
    assert not torch.equal(written["model.layers.2.eh_proj.weight"], own["model.layers.2.eh_proj.weight"])
    capsys.readouterr()
    assert cli.main(["serve", f"run.dir={run}", "--print"]) == 0
    # How many drafts pay is a matter of this machine's seconds.
    assert '{"method": "mtp", "num_speculative_tokens": ' in capsys.readouterr().out
