"""A native head computes what transformers' own decoder layer does, for every family: in training (unrolled over
packed documents) and in decoding (from a cache), step by step; what is written is what was read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafter_tools import packed, split_by_document, students
from mtp_tools import FACTS, KEPT, MtpReference, MtpTarget, mtp_target
from reference import counts
from safetensors import safe_open
from safetensors.torch import load_file

from spectrain.decoding.proposers import Observation, read_hidden
from spectrain.decoding.sampling import GREEDY
from spectrain.drafters.autoregressive.mtp import METHOD
from spectrain.drafters.autoregressive.mtp_tensors import HeadReader
from spectrain.drafters.drafter_folder import load_drafter, save_drafter
from spectrain.drafters.overlay import check_links
from spectrain.errors import ConfigError
from spectrain.target.checkpoint import CheckpointReader

STEPS = 3
MASKS = ("0011111", "0110111", "1111")


@pytest.fixture(scope="module", params=[name for name in FACTS if name != "qwen3_5_text"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MtpTarget:
    return MtpTarget(request.param, mtp_target(request.param, tmp_path_factory.mktemp(request.param)))


def test_every_student_is_the_servers_draft(target: MtpTarget) -> None:
    drafter, reference = target.drafter(STEPS), MtpReference(target)
    documents = [target.document(mask, seed) for seed, mask in enumerate(MASKS)]
    found, expected = students(drafter, packed(documents)), 0
    for states, start in zip(documents, split_by_document(documents), strict=True):
        ids, mask = states.input_ids.tolist(), states.loss_mask.tolist()
        for t in range(len(ids)):
            counted = [k for k in range(STEPS) if counts(mask, t, k)]
            if not counted:
                continue
            chain = reference.chain(ids[: t + 2], states.last_hidden, counted[-1] + 1, drafts=ids[t + 2 :])
            for k in counted:
                torch.testing.assert_close(found[start + t, k], chain.normed[k], rtol=1e-5, atol=1e-6)
            expected += len(counted)
    assert len(found) == expected


def test_greedy_drafts_are_the_reference(target: MtpTarget) -> None:
    drafter, reference = target.drafter(), MtpReference(target)
    for states in (target.document("0" * length, length) for length in (3, 9)):
        ids = states.input_ids
        cache = drafter.new_cache(1)
        for start, end in ((0, 1), (1, len(ids) - 1)):  # in two pieces
            hidden = read_hidden(drafter, drafter.head, states.last_hidden[start:end])[None]
            drafter.observe(
                cache, Observation(ids[None, start:end].long(), torch.tensor([end - start]), last_hidden_BTH=hidden)
            )
        proposal = drafter.propose(cache, ids[-1:].long(), 5, GREEDY)  # deeper than it is trained
        assert proposal.ids[0].tolist() == reference.chain(ids.tolist(), states.last_hidden, 5).tokens


def test_what_is_written_is_what_was_read(target: MtpTarget, tmp_path: Path) -> None:
    """Names, layout of experts and bits of the target's own; every other tensor is a link to it."""
    drafter = MtpTarget(target.family, target.folder, torch.float32).drafter()
    folder = tmp_path / "drafter"
    save_drafter(drafter, folder, target="t", target_architectures=target.spec.architectures, num_speculative_tokens=2)
    stored, own = load_file(folder / "tuned-mtp.safetensors"), load_file(target.folder / "model.safetensors")
    assert set(stored) == {name for name in own if name.startswith(FACTS[target.family].prefix) and KEPT not in name}
    assert all(torch.equal(tensor, own[name]) for name, tensor in stored.items())
    reader = CheckpointReader(folder)
    assert reader.names == set(own)
    assert all(torch.equal(reader.get(name), tensor) for name, tensor in own.items())
    check_links(folder, digests=True)
    again = load_drafter(folder).attach(drafter.head)
    state = again.body.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in drafter.body.state_dict().items())
    assert again.shape == drafter.shape


def test_only_the_heads_own_tensors_are_read(target: MtpTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning the head of a mixture of experts does not load the target's experts."""
    read: list[str] = []
    monkeypatch.setattr(
        HeadReader, "tensor", lambda self, name, own=HeadReader.tensor: (read.append(name), own(self, name))[1]
    )
    target.drafter()
    with safe_open(target.folder / "model.safetensors", framework="pt") as file:
        own = [name for name in file.keys() if name.startswith(FACTS[target.family].prefix)]  # noqa: SIM118
    assert sorted(read) == sorted(name for name in own if KEPT not in name)


def test_a_head_from_the_last_layer_has_its_weights(target: MtpTarget) -> None:
    if target.family == "deepseek_v32":  # its indexer is not trained here
        with pytest.raises(ConfigError, match=r"drafter\.init=last_layer: a head of deepseek_v32 has an indexer"):
            target.drafter(init="last_layer")
        return
    reference, drafter = MtpReference(target), target.drafter(init="last_layer")
    decoder = target.model.model.get_decoder()
    kinds = getattr(decoder.config, "layer_types", None) or ["full_attention"] * 4
    last = decoder.layers[max(index for index, kind in enumerate(kinds) if kind == "full_attention")]
    assert set(last.state_dict()) == set(reference.layer.state_dict())
    layer = drafter.body.layers[0].state_dict()
    for name, tensor in last.state_dict().items():
        torch.testing.assert_close(layer[name], tensor, msg=name, check_dtype=False)  # routers keep float32
    torch.testing.assert_close(drafter.body.norm.weight, decoder.norm.weight)
    assert METHOD.comes_with(drafter.shape, target.folder)
