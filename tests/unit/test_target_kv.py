"""The target's own keys and values of named layers: out of the model, cache and store, as transformers has them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from gemma4_tools import SORTS, Gemma4, random_ids
from tiny import tiny_config, tiny_target

from spectrain.data.hidden_states import StoredHiddenStates, StoreMeta, TargetStates, bytes_per_token
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.packing import pack_batch
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling
from spectrain.engines.check_states import check_states
from spectrain.engines.hf import capture_states
from spectrain.errors import ConfigError, NotFiniteError, RunError
from spectrain.target.kv_cache import open_cache
from spectrain.target.spec import TargetSpec


@pytest.fixture(scope="module", params=SORTS)
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gemma4:
    return Gemma4.make(request.param, tmp_path_factory.mktemp("kv") / request.param)


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_layers_and_their_shapes(gemma: Gemma4) -> None:
    spec = gemma.target.spec
    shared = spec.shared_kv_layers
    assert spec.kv_sources() == {"sliding_attention": 2 - shared, "full_attention": 3 - shared}
    one = gemma.states(random_ids(5, 0), [])
    for layer, (keys_SGd, values_SGd) in one.target_kv.items():
        assert keys_SGd.shape[1:] == values_SGd.shape[1:] == spec.kv_shape(layer)
    assert TargetSpec.from_config(tiny_config("llama")).kv_sources() == {"full_attention": 3}


@pytest.mark.parametrize("ragged", [False, True])
def test_a_cache_hands_out_those_of_the_new_tokens(gemma: Gemma4, ragged: bool) -> None:
    """Rows of different lengths, some of whose tokens are taken out again."""
    texts = [random_ids(n, n) for n in (30, 21)]
    wanted = [gemma.states(text, []).target_kv for text in texts]
    layers = tuple(wanted[0])
    cache, done = open_cache(gemma.target, 2), [0, 0]
    for step, (widths, kept) in enumerate([((6, 9), (6, 9)), ((5, 5), (2, 5)), ((5, 3) if ragged else (4, 4), (3, 1))]):
        ids = torch.full((2, max(widths)), 7)
        for row, text in enumerate(texts):  # right tokens up to what is kept, wrong ones behind
            ids[row, : kept[row]] = torch.tensor(text[done[row] : done[row] + kept[row]])
        output = cache.forward(ids, list(widths), (), layers)
        assert output.target_kv is not None and set(output.target_kv) == set(layers), step
        for layer in layers:
            for part, new_BGTd in enumerate(output.target_kv[layer]):
                for row in range(2):
                    own_SGd = wanted[row][layer][part][done[row] : done[row] + kept[row]]
                    assert_near(new_BGTd[row, :, : kept[row]].transpose(0, 1), own_SGd)
        cache.keep(list(kept))
        done = [a + b for a, b in zip(done, kept, strict=True)]


def responses(texts: list[list[int]]) -> list[Response]:
    made = []
    for number, text in enumerate(texts):
        mask = np.array([0] * 3 + [1] * (len(text) - 3), dtype=np.uint8)
        made.append(
            Response(
                key=f"{number:02d}",
                conversation=Conversation(id=str(number), turns=("x",)),
                split="train",
                input_ids=np.array(text, dtype=np.int32),
                loss_mask=mask,
                finish_reason="length",
                sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=8, seed=0),
                domain=None,
            )
        )
    return made


def test_capture_of_packed_documents_gives_each_its_own(gemma: Gemma4) -> None:
    texts = [random_ids(n, n) for n in (17, 12, 9)]
    layers = tuple(gemma.target.spec.kv_sources().values())
    found = {
        one.key: one for one in capture_states(gemma.target, gemma.head, responses(texts), (), layers, 64, "float32")
    }
    for number, text in enumerate(texts):
        for layer, pair in gemma.states(text, []).target_kv.items():
            for ours, own in zip(found[f"{number:02d}"].target_kv[layer], pair, strict=True):
                assert_near(ours, own)


def test_a_wrapper_of_images_hands_out_its_language_models(tmp_path: Path) -> None:
    gemma = Gemma4.make("e_series", tmp_path, family="gemma4")
    texts, layers = [random_ids(12, 1), random_ids(9, 2)], gemma.target.spec.kv_sources().values()
    for one in capture_states(gemma.target, gemma.head, responses(texts), (), tuple(layers), 64, "float32"):
        for layer, pair in gemma.states(texts[int(one.key)], []).target_kv.items():
            assert_near(one.target_kv[layer][0], pair[0])
            assert_near(one.target_kv[layer][1], pair[1])


@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_wrong_ones_are_not_stored(gemma: Gemma4, part: int) -> None:
    one = gemma.states(random_ids(4, 1), random_ids(8, 2))
    check_states(gemma.target, gemma.head, [one])
    layer = gemma.target.spec.kv_sources()["full_attention"]
    pair = list(one.target_kv[layer])
    pair[part] = pair[part].roll(1, 0)
    wrong = dataclasses.replace(one, target_kv={**one.target_kv, layer: (pair[0], pair[1])})
    with pytest.raises(RunError, match=rf"{('keys', 'values')[part]} of layer {layer} are not the target's"):
        check_states(gemma.target, gemma.head, [wrong])


def store_meta(gemma: Gemma4, dtype: str) -> StoreMeta:
    spec = gemma.target.spec
    shapes = tuple((layer, *spec.kv_shape(layer)) for layer in sorted(spec.kv_sources().values()))
    return StoreMeta("t", "r", "c", "k", "p", (), spec.hidden_size, spec.num_layers, dtype, kv_layers=shapes)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_store_keeps_them(gemma: Gemma4, dtype: str, tmp_path: Path) -> None:
    meta = store_meta(gemma, dtype)
    documents = [gemma.states(random_ids(n, n), random_ids(4, 0), key=f"{n:02d}") for n in (9, 14)]
    with HiddenStatesWriter(tmp_path, meta) as writer:
        for one in documents:
            writer.add(one)
    store = StoredHiddenStates(tmp_path)
    assert store.meta == meta
    width = {"float32": 4, "int8": 1}[dtype]
    kv = sum(2 * heads * (size * width + (4 if dtype == "int8" else 0)) for _, heads, size in meta.kv_layers)
    assert (
        bytes_per_token(meta) == 4 + 1 + 4 + gemma.target.spec.hidden_size * width + (4 if dtype == "int8" else 0) + kv
    )
    for one, found in zip(documents, (store[0], store[1]), strict=True):
        for layer, pair in one.target_kv.items():
            for own, ours in zip(pair, found.target_kv[layer], strict=True):
                # 8 bits: half a step of a row of one head.
                most = own.abs().amax(-1, keepdim=True) / 254 * 1.001 if dtype == "int8" else torch.zeros(1)
                assert bool(((ours - own).abs() <= most).all())
    batch = pack_batch([store[0], store[1]], max_tokens=10)
    for layer, pair in batch.target_kv.items():
        for part, packed_TGd in enumerate(pair):
            wanted = [store[number].target_kv[layer][part][:10] for number in (0, 1)]
            assert torch.equal(packed_TGd, torch.cat(wanted))
    assert batch.to("cpu").target_kv.keys() == batch.target_kv.keys()


def test_what_is_not_a_number_is_not_stored(gemma: Gemma4, tmp_path: Path) -> None:
    one: TargetStates = gemma.states(random_ids(5, 1), random_ids(4, 2))
    next(iter(one.target_kv.values()))[1][2, 0, 0] = torch.nan
    with HiddenStatesWriter(tmp_path, store_meta(gemma, "float32")) as writer, pytest.raises(NotFiniteError):
        writer.add(one)


def test_a_layer_that_hands_out_nothing_is_named(gemma: Gemma4, tmp_path: Path) -> None:
    ids = torch.tensor([[3, 4]])
    with pytest.raises(ConfigError, match="layer 7 does not hand out its keys and values, only its layers"):
        gemma.target.run(ids, torch.arange(2)[None], kv_layers=(7,))


def test_another_family_hands_out_none(tmp_path: Path) -> None:
    from spectrain.config.target_schema import TargetConfig
    from spectrain.target.model import TargetModel
    from spectrain.target.resolve import resolve_target

    config = TargetConfig(path=str(tiny_target("llama", tmp_path)))
    target = TargetModel.load(resolve_target(config), config)
    with pytest.raises(ConfigError, match="none of its layers does"):
        target.run(torch.tensor([[3]]), torch.zeros(1, 1, dtype=torch.long), kv_layers=(3,))
