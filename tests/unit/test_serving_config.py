"""What a drafter's folder or repository says to those who serve it, and whether it was trained for a target."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from drafter_tools import HIDDEN, VOCAB
from served_drafters import COMMIT, command, drafter, rewrite, speculation, target

from spectrain.drafters import serving_config as served
from spectrain.drafters.serving_config import read_serving_config
from spectrain.errors import InputError
from spectrain.target.identity import TargetIdentity

pytestmark = pytest.mark.vllm  # what is started, and with which arguments, goes by the vLLM that is installed


__all__ = ["drafter", "target"]


def test_a_folder_is_read_without_its_weights(drafter, target):
    (drafter / "model.safetensors").unlink()
    found = read_serving_config(str(drafter))
    assert (found.path, found.method, found.target, found.revision) == (str(drafter), "eagle3", str(target), None)
    assert (found.num_speculative_tokens, found.most_tokens, found.drafts_step_by_step) == (4, None, True)
    assert (found.vocab_size, found.hidden_size, found.last_tap) == (VOCAB, HIDDEN, 4)
    assert found.speculative_config() == {"model": str(drafter), "method": "eagle3", "num_speculative_tokens": 4}
    assert found.speculative_config(2)["num_speculative_tokens"] == 2


@pytest.mark.parametrize(
    ("changes", "method", "extra", "most"),
    [
        ({"speculators_model_type": "peagle"}, "eagle3", {"parallel_drafting": True}, None),
        ({"speculators_model_type": "dflash", "block_size": 8, "sample_from_anchor": False}, "dflash", {}, 7),
        ({"speculators_model_type": "dflash2", "block_size": 8, "sample_from_anchor": False}, "dflash", {}, 7),
        ({"speculators_model_type": "dspark", "block_size": 7, "sample_from_anchor": True}, "dspark", {}, 7),
    ],
)
def test_methods_go_by_vllms_names(drafter, changes, method, extra, most):
    rewrite(drafter, **changes)
    found = read_serving_config(str(drafter))
    assert found.speculative_config() == {"model": str(drafter), "method": method, "num_speculative_tokens": 4, **extra}
    assert found.most_tokens == most
    assert not found.drafts_step_by_step


def test_what_is_no_drafter_is_named(tmp_path, drafter):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty holds no drafter \(config.json is missing\)"):
        read_serving_config(str(tmp_path / "empty"))
    rewrite(drafter, speculators_config=None)
    with pytest.raises(InputError, match="not in the speculators layout"):
        read_serving_config(str(drafter))
    rewrite(drafter, speculators_config={"verifier": {"name_or_path": "x"}})
    with pytest.raises(InputError, match="field 'proposal_methods' is missing"):
        read_serving_config(str(drafter))
    (drafter / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        read_serving_config(str(drafter))
    with pytest.raises(InputError, match="no folder, and no name that the Hub could have"):
        read_serving_config(str(tmp_path / "nothing"))


@pytest.mark.parametrize("drafts", [float("inf"), float("nan"), 0, -1, 2.5, "4", None, True, [4]])
def test_a_number_of_drafts_that_none_can_be(drafter, drafts):
    config = json.loads((drafter / "config.json").read_text())
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = drafts
    (drafter / "config.json").write_text(json.dumps(config))  # as others write it: with Infinity and NaN
    with pytest.raises(InputError, match=r"config.json describes no drafter \(speculative_tokens"):
        read_serving_config(str(drafter))


@pytest.mark.parametrize("length", [float("inf"), 0])
def test_a_length_that_none_can_be(drafter, length):
    rewrite(drafter, spectrain={"max_model_len": length})
    with pytest.raises(InputError, match=r"spectrain\.max_model_len"):
        read_serving_config(str(drafter))


def test_a_drafter_on_the_hub_is_pinned_to_what_was_read(drafter, target, monkeypatch):
    """Only config.json is fetched; the commit it came from is what the server is told to load."""
    snapshot = drafter.parent / COMMIT
    snapshot.mkdir()
    (snapshot / "config.json").write_bytes((drafter / "config.json").read_bytes())
    asked = []

    def download(repo, file, **options):
        asked.append((repo, file))
        return str(snapshot / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    found = speculation(command("drafter.path=org/drafter"))
    assert found == {"model": "org/drafter", "method": "eagle3", "revision": COMMIT, "num_speculative_tokens": 4}
    assert set(asked) == {("org/drafter", "config.json")}


def test_a_hub_that_gives_nothing(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def nowhere(*arguments, **options):
        raise LocalEntryNotFoundError("not in the cache")

    def unreachable(*arguments, **options):
        raise OSError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", nowhere)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(model_info=unreachable))
    with pytest.raises(
        InputError,
        match=r"drafter.path=org/drafter is no folder here, and the Hub gives no config.json .*no route to host",
    ):
        served.read_serving_config("org/drafter")


A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("recorded", "revision", "fingerprint", "expected"),
    [  # what the drafter's folder says: revision, fingerprint, name; then the target that is here
        ((COMMIT, A, "org/t"), COMMIT, A, True),
        ((COMMIT, A, "org/t"), A, A, True),  # the same weights, copied from the Hub's folder
        ((COMMIT, A, "org/t"), B, B, False),
        ((COMMIT, None, "org/t"), A, A, None),  # a commit and a fingerprint: who knows
        ((COMMIT, None, "org/t"), 40 * "f", A, False),
        ((A, None, "/x/t"), A, A, True),
        ((A, None, "/x/t"), B, B, False),
        ((COMMIT, A, "org/t"), COMMIT, None, True),  # on the Hub, not here
        ((COMMIT, A, "org/t"), 40 * "f", None, False),
        ((None, None, "org/T"), A, A, True),  # by others, who write a name at most
        ((None, None, "org/other"), A, A, None),
        ((None, None, None), A, A, True),
    ],
)
def test_whether_a_drafter_was_trained_for_a_target(drafter, recorded, revision, fingerprint, expected):
    target_revision, target_fingerprint, name = recorded
    known = {"target_revision": target_revision, "target_fingerprint": target_fingerprint, "target": name}
    found = dataclasses.replace(read_serving_config(str(drafter)), **known)
    revisions = frozenset({revision} | ({fingerprint} if fingerprint else set()))
    here = TargetIdentity("/models/t", "t", revision, revisions, fingerprint and "0123")
    assert found.belongs_to(here) is expected
    assert (found.other_target(here) is None) is (expected is True)
