"""Whatever was drafted and thrown away, the cached target must compute what one pass over the kept text computes."""

import dataclasses

import pytest
import torch
from decoders import float64_target, full_forward
from transformers.masking_utils import create_masks_for_generate

from spectrain.errors import ConfigError, InputError
from spectrain.target.cpu_kernels import cpu_attention
from spectrain.target.hybrid_cache import HybridCache, SnapshotCache
from spectrain.target.kv_cache import open_cache
from spectrain.target.slot_cache import AttentionMasks, SlotCache

# One family per shape of cache: plain, query/key norm, one window for all layers, windows in turn, soft-capped scores,
# layers that share keys and values, keys wider than values, keys that an indexer chooses, attention sinks (eager),
# recurrent layers.
CASES = [
    ("llama", "sdpa", {}),
    ("llama", "eager", {}),
    ("qwen3", "sdpa", {}),
    ("mistral", "sdpa", {"sliding_window": 6}),
    ("gemma2", "eager", {}),
    ("gemma3", "sdpa", {}),
    ("gemma4", "sdpa", {}),
    ("deepseek_v3", "sdpa", {}),
    ("deepseek_v32", "sdpa", {}),
    ("gpt_oss", "eager", {}),
    ("qwen3_5", "sdpa", {}),
    ("qwen3_next", "sdpa", {}),
]


@pytest.mark.parametrize(("family", "attention", "overrides"), CASES)
def test_kept_tokens_see_only_kept_tokens(family, attention, overrides, tmp_path):
    _kept_tokens_see_only_kept_tokens(open_cache, family, attention, overrides, tmp_path)


def test_kept_tokens_see_only_kept_tokens_row_by_row(tmp_path):
    """As hybrid targets of unknown kinds run."""
    _kept_tokens_see_only_kept_tokens(SnapshotCache, "qwen3_5", "sdpa", {}, tmp_path)


def _kept_tokens_see_only_kept_tokens(make_cache, family, attention, overrides, tmp_path):
    target = float64_target(family, tmp_path, attention, **overrides)
    # Some things are float32 whatever the model's type: an eager softmax, routers, and much of a recurrent layer.
    tolerance = 2e-4 if target.spec.hybrid else 1e-5
    taps = (1, target.spec.num_layers)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(3, target.spec.vocab_size, (3, 160), generator=generator)
    expected = [full_forward(target, text.tolist(), taps) for text in texts]
    cache = make_cache(target, 3)
    rows, done = [0, 1, 2], [5, 11, 2]

    output = cache.forward(texts[:, : max(done)], done, taps)
    cache.keep(done)
    _compare(output, expected, rows, [0, 0, 0], done, tolerance)
    for step in range(24):
        if step == 12:
            cache.select([2, 0])
            rows, done = [2, 0], [done[2], done[0]]
        width = int(torch.randint(2, 8, (1,), generator=generator))
        keep = torch.randint(1, width + 1, (len(rows),), generator=generator).tolist()
        # Right tokens up to what is kept, wrong ones after.
        ids = torch.randint(3, target.spec.vocab_size, (len(rows), width), generator=generator)
        for b, row in enumerate(rows):
            ids[b, : keep[b]] = texts[row, done[b] : done[b] + keep[b]]
        output = cache.forward(ids, [width] * len(rows), taps)
        cache.keep(keep)
        _compare(output, expected, rows, done, keep, tolerance)
        done = [length + count for length, count in zip(done, keep, strict=True)]
    assert max(done) > 64  # the buffers have grown


def _compare(output, expected, rows, starts, counts, tolerance):
    for b, row in enumerate(rows):
        hidden, taps = expected[row]
        where = slice(starts[b], starts[b] + counts[b])
        torch.testing.assert_close(
            output.last_hidden_BSH[b, : counts[b]], hidden[where], rtol=tolerance, atol=tolerance
        )
        torch.testing.assert_close(output.taps_BSAH[b, : counts[b]], taps[where], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "gemma4", "deepseek_v3"])
def test_rows_of_different_lengths_run_as_one(family, tmp_path, monkeypatch):
    """No padding enters the model, and what comes out is what the padded rectangle gives."""
    target = float64_target(family, tmp_path, **({"sliding_window": 6} if family == "mistral" else {}))
    taps = (1, target.spec.num_layers)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(3, target.spec.vocab_size, (3, 90), generator=generator)
    expected = [full_forward(target, text.tolist(), taps) for text in texts]
    passes = []
    run = target.run
    monkeypatch.setattr(
        target, "run", lambda ids, *args, **kwargs: passes.append(tuple(ids.shape)) or run(ids, *args, **kwargs)
    )
    cache, rows, done = open_cache(target, 3), [0, 1, 2], [0, 0, 0]
    with cpu_attention(target.model):
        for step, lengths in enumerate([[40, 3, 17], [5, 1, 2], [1, 1, 1], [3, 3, 3], [1, 8, 1], [7, 2], [30, 1]]):
            if step == 5:
                cache.select([2, 0])
                rows, done = [2, 0], [done[2], done[0]]
            keep = [max(1, length - 1) for length in lengths]
            ids = torch.randint(3, target.spec.vocab_size, (len(rows), max(lengths)), generator=generator)
            for b, row in enumerate(rows):
                ids[b, : keep[b]] = texts[row, done[b] : done[b] + keep[b]]
            output = cache.forward(ids, lengths, taps)
            cache.keep(keep)
            _compare(output, expected, rows, done, keep, 1e-5)
            assert output.last_hidden_BSH.shape[:2] == ids.shape
            even = len(set(lengths)) == 1
            assert passes.pop() == (tuple(ids.shape) if even else (1, sum(lengths)))
            done = [length + count for length, count in zip(done, keep, strict=True)]


def test_kind_of_cache_follows_the_target(tmp_path):
    assert isinstance(open_cache(float64_target("llama", tmp_path / "a"), 1), SlotCache)
    target = float64_target("qwen3_5", tmp_path / "b")
    assert isinstance(open_cache(target, 1), HybridCache)
    mixed = dataclasses.replace(target.spec, layer_types=("hybrid", "full_attention"))
    target.spec = mixed
    assert isinstance(open_cache(target, 1), SnapshotCache)


def test_taking_tokens_out_copies_no_keys(tmp_path):
    target = float64_target("llama", tmp_path)
    cache = SlotCache(target, 2)
    cache.forward(torch.randint(3, 300, (2, 7)), [7, 4], ())
    cache.keep([7, 4])
    before = [layer.keys.data_ptr() for layer in cache.layers]
    cache.forward(torch.randint(3, 300, (2, 5)), [5, 5], ())
    cache.keep([1, 3])
    cache.forward(torch.randint(3, 300, (2, 5)), [5, 5], ())
    assert [layer.keys.data_ptr() for layer in cache.layers] == before


def test_hybrid_rows_run_together_and_again_only_what_was_rejected(tmp_path, monkeypatch):
    target = float64_target("qwen3_5", tmp_path)
    cache = HybridCache(target, 4)
    passes = []
    run = target.run
    monkeypatch.setattr(
        target, "run", lambda ids, *args, **kwargs: passes.append(tuple(ids.shape)) or run(ids, *args, **kwargs)
    )

    def shapes(lengths, keep):
        passes.clear()
        cache.forward(torch.randint(3, 300, (4, max(lengths))), lengths, ())
        cache.keep(keep)
        return list(passes)

    assert shapes([6, 4, 6, 6], [6, 4, 6, 6]) == [(3, 6), (1, 4)]
    assert shapes([4, 4, 4, 4], [4, 2, 1, 2]) == [(4, 4), (2, 2), (1, 1)]  # those that lost drafts, by what they keep
    assert shapes([4, 1, 4, 4], [4, 1, 4, 3]) == [(3, 4), (1, 1), (1, 3)]
    assert shapes([1, 1, 1, 1], [1, 1, 1, 1]) == [(4, 1)]


def test_hybrid_rows_of_different_lengths_leave_and_join(tmp_path):
    target = float64_target("qwen3_next", tmp_path)
    taps = (1, target.spec.num_layers)
    generator = torch.Generator().manual_seed(2)
    texts = torch.randint(3, target.spec.vocab_size, (4, 60), generator=generator)
    expected = [full_forward(target, text.tolist(), taps) for text in texts]
    cache, rows, done = open_cache(target, 3), [0, 1, 2], [0, 0, 0]
    for step, lengths in enumerate([[9, 3, 17], [5, 1, 2], [1, 4, 1, 4], [3, 3, 3, 3], [1, 8, 1, 2], [7, 2, 7]]):
        if step == 2:
            joining = open_cache(target, 1)
            joining.forward(texts[3:, :6], [6], taps)
            joining.keep([6])
            cache.extend(joining)
            rows, done = [*rows, 3], [*done, 6]
        if step == 5:
            cache.select([3, 0, 2])
            rows, done = [rows[i] for i in (3, 0, 2)], [done[i] for i in (3, 0, 2)]
        keep = [length if step == 0 else max(1, length - b) for b, length in enumerate(lengths)]
        ids = torch.randint(3, target.spec.vocab_size, (len(rows), max(lengths)), generator=generator)
        for b, row in enumerate(rows):
            ids[b, : keep[b]] = texts[row, done[b] : done[b] + keep[b]]
        output = cache.forward(ids, lengths, taps)
        cache.keep(keep)
        _compare(output, expected, rows, done, keep, 2e-4)
        assert output.last_hidden_BSH.shape[:2] == ids.shape
        done = [length + count for length, count in zip(done, keep, strict=True)]


@pytest.mark.parametrize(
    ("family", "overrides"), [("llama", {}), ("mistral", {"sliding_window": 3}), ("gemma3_text", {"sliding_window": 4})]
)
def test_masks_are_those_of_transformers_where_all_rows_agree(family, overrides, tmp_path):
    target = float64_target(family, tmp_path, "eager", **overrides)
    length = 11
    ours = AttentionMasks(target).build(torch.arange(length)[None], length)
    embeddings = torch.zeros(1, length, target.spec.hidden_size, dtype=target.dtype)
    theirs = create_masks_for_generate(target.model.config, embeddings, None, None)
    assert isinstance(ours, dict) == isinstance(theirs, dict)
    if not isinstance(ours, dict):
        ours, theirs = {"all": ours}, {"all": theirs}
    assert ours.keys() == theirs.keys()
    for kind, mask in ours.items():
        assert torch.equal(mask == 0, theirs[kind] == 0)
        assert mask.dtype == target.dtype


def test_chunked_layers_see_their_own_chunk(tmp_path):
    target = float64_target("llama", tmp_path)
    target.model.config.attention_chunk_size = 4
    mask = AttentionMasks(target).build(torch.tensor([[5, 6]]), 8)
    assert mask[0, 0].long().tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 0]]


def test_what_cannot_be_decoded_with_is_said(tmp_path):
    target = float64_target("llama", tmp_path)
    target.model.config.layer_types = ["compressed_sparse_attention"] * 4
    with pytest.raises(InputError, match="compressed_sparse_attention"):
        SlotCache(target, 1)
    target.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match="attn_implementation=flash_attention_2"):
        SlotCache(target, 1)
