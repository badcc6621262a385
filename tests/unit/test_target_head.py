"""The head alone against the whole model of transformers, for every family; and what must fail."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CONFIGS, VOCAB_SIZE, tiny_config, tiny_target
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from spectrain.errors import InputError
from spectrain.target import head as head_module
from spectrain.target.checkpoint import CheckpointReader
from spectrain.target.families import FAMILIES, SQRT_HIDDEN, head_math
from spectrain.target.head import TargetHead

TOLERANCE = 2e-5
WRAPPERS = ("gemma3", "gemma4", "qwen3_5")


@dataclasses.dataclass
class Reference:
    """What transformers' own model computes on a few tokens: ids, scaled embeddings, input of the final norm, its
    output, logits.
    """

    ids_BS: torch.Tensor
    embedded_BSH: torch.Tensor
    last_hidden_BSH: torch.Tensor
    normed_BSH: torch.Tensor
    logits_BSV: torch.Tensor


@torch.no_grad()
def reference(folder, dtype=torch.float32):
    is_causal = type(AutoConfig.from_pretrained(folder)) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto_class = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
    model = auto_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    ids_BS = torch.randint(3, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1))
    seen = []
    handle = model.get_decoder().norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    output = model(input_ids=ids_BS, output_hidden_states=True, use_cache=False)
    handle.remove()
    return Reference(ids_BS, output.hidden_states[0], seen[0], output.hidden_states[-1], output.logits.float())


def largest_error(a, b):
    return (a.float() - b.float()).abs().max().item()


def rewrite(folder, drop=(), **changed):
    """Edits the tensors of a single-file checkpoint. Keyword names have dots written as double underscores."""
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in drop}
    tensors.update({name.replace("__", "."): tensor for name, tensor in changed.items()})
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", CONFIGS)
def test_head_equals_the_model(family, tmp_path):
    expected = reference(tiny_target(family, tmp_path))
    head = TargetHead.from_checkpoint(tmp_path)
    assert largest_error(head.embed(expected.ids_BS), expected.embedded_BSH) == 0
    assert largest_error(head.post_norm(expected.last_hidden_BSH), expected.normed_BSH) < TOLERANCE
    assert largest_error(head.hidden_to_logits(expected.last_hidden_BSH), expected.logits_BSV) < TOLERANCE


def test_every_family_of_the_table_is_compared_with_its_model():
    compared = {tiny_config(family).get_text_config(decoder=True).model_type for family in CONFIGS}
    assert compared == set(FAMILIES) - {"mimo"}  # which transformers does not have: its decoder is Qwen2's


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "cohere", *WRAPPERS])
def test_sharded_checkpoints_tied_and_untied(family, tied, tmp_path):
    expected = reference(tiny_target(family, tmp_path, tie_word_embeddings=tied, shard_size="20KB"))
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    head = TargetHead.from_checkpoint(tmp_path)
    assert (head.lm_head_weight is head.embed_weight) == tied
    assert largest_error(head.hidden_to_logits(expected.last_hidden_BSH), expected.logits_BSV) < TOLERANCE


@pytest.mark.parametrize("family", ["gemma2", "granite", "qwen3"])
def test_head_in_bfloat16_rounds_as_the_model_does(family, tmp_path):
    # √48 is no bfloat16 number, so the embedding scale's own rounding shows.
    expected = reference(
        tiny_target(family, tmp_path, dtype=torch.bfloat16, hidden_size=48, num_attention_heads=4), torch.bfloat16
    )
    head = TargetHead.from_checkpoint(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(head.embed(expected.ids_BS), expected.embedded_BSH)
    scale = expected.logits_BSV.abs().max().item()
    assert largest_error(head.hidden_to_logits(expected.last_hidden_BSH), expected.logits_BSV) < 0.02 * scale


# --- The comparison above is worth something only if it fails when a fact is wrong ---------------------------------


def mutants(family):
    """Every single fact of a family's entry, turned wrong."""
    math = head_math(tiny_config(family))
    yield "gain", dataclasses.replace(math, family=dataclasses.replace(math.family, one_plus=not math.family.one_plus))
    other_norm = "rms" if math.family.norm == "layer" else "layer"
    yield "norm", dataclasses.replace(math, family=dataclasses.replace(math.family, norm=other_norm))
    yield "eps", dataclasses.replace(math, eps=0.5)
    yield "scale", dataclasses.replace(math, logit_scale=1.0 if math.logit_scale != 1.0 else 0.5)
    yield "cap", dataclasses.replace(math, soft_cap=None if math.soft_cap else 3.0)
    yield "embedding", dataclasses.replace(math, embed_scale=1.0 if math.embed_scale != 1.0 else math.hidden_size**0.5)


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "gemma3_text", "gemma4", "qwen3_5", "qwen3_moe", "cohere", "granite"]
)
def test_every_wrong_fact_shows(family, tmp_path):
    expected = reference(tiny_target(family, tmp_path))
    head = TargetHead.from_checkpoint(tmp_path)
    for name, math in mutants(family):
        head.math = math
        logits_error = largest_error(head.hidden_to_logits(expected.last_hidden_BSH), expected.logits_BSV)
        embed_error = largest_error(head.embed(expected.ids_BS), expected.embedded_BSH)
        assert max(logits_error, embed_error) > 0.01, f"{family} with a wrong {name} was not noticed"


def test_scales_come_from_the_configuration():
    granite = head_math(tiny_config("granite", logits_scaling=8.0, embedding_multiplier=12.0))
    assert (granite.logit_scale, granite.embed_scale) == (0.125, 12.0)
    assert head_math(tiny_config("cohere", logit_scale=0.0625)).logit_scale == 0.0625
    assert head_math(tiny_config("gemma", hidden_size=64, num_attention_heads=4)).embed_scale == 8.0
    assert head_math(tiny_config("gemma2", final_logit_softcapping=None)).soft_cap is None
    assert FAMILIES["gemma2"].embed_scale == SQRT_HIDDEN


# --- Parts of the vocabulary, chunks, modules ----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere"])
def test_a_selected_vocabulary_gives_those_columns(family, tmp_path):
    head = TargetHead.from_checkpoint(tiny_target(family, tmp_path))
    hidden_TH, ids_D = torch.randn(5, 32), torch.tensor([7, 3, 250, 3])
    full_TV = head.hidden_to_logits(hidden_TH)
    assert torch.allclose(head.hidden_to_logits(hidden_TH, ids_D), full_TV[:, ids_D], atol=1e-6)
    raw_TD = head.post_norm(hidden_TH) @ head.lm_head_weight[ids_D].T
    assert torch.allclose(head.transform_logits(raw_TD), full_TV[:, ids_D], atol=1e-6)


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 11])
def test_log_normalizer_in_chunks_equals_float64(tokens, tmp_path, monkeypatch):
    head = TargetHead.from_checkpoint(tiny_target("gemma2", tmp_path))
    monkeypatch.setattr(head_module, "_CHUNK_LOGITS", 3 * VOCAB_SIZE + 1)
    rows = []
    whole = head.hidden_to_logits
    monkeypatch.setattr(head, "hidden_to_logits", lambda hidden: rows.append(len(hidden)) or whole(hidden))
    hidden_TH = 4 * torch.randn(tokens, 32)

    result_T = head.log_normalizer(hidden_TH)

    hidden = hidden_TH.double()
    normed = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + head.norm_weight.double())
    logits = 3 * torch.tanh(normed @ head.lm_head_weight.double().T / 3)
    assert result_T.dtype == torch.float32
    assert result_T.shape == (tokens,)
    assert torch.allclose(result_T.double(), logits.exp().sum(-1).log(), atol=1e-5)
    assert max(rows, default=0) <= 3, "more than a chunk of logits was held"


def test_head_is_frozen_unsaved_and_keeps_one_tied_tensor(tmp_path):
    head = TargetHead.from_checkpoint(tiny_target("llama", tmp_path, tie_word_embeddings=True))
    assert list(head.parameters()) == []
    assert head.state_dict() == {}
    head.to(torch.float64)
    assert head.lm_head_weight is head.embed_weight
    assert head.lm_head_weight.dtype == torch.float64


def test_gradients_flow_into_the_hidden_state(tmp_path):
    head = TargetHead.from_checkpoint(tiny_target("gemma2", tmp_path))
    hidden_TH = torch.randn(3, 32, requires_grad=True)
    head.hidden_to_logits(hidden_TH).sum().backward()
    assert hidden_TH.grad.abs().min() > 0


def test_only_the_heads_tensors_are_read(tmp_path, monkeypatch):
    tiny_target("qwen3", tmp_path)
    read = []
    get = CheckpointReader.get
    monkeypatch.setattr(CheckpointReader, "get", lambda reader, name: read.append(name) or get(reader, name))
    TargetHead.from_checkpoint(tmp_path)
    assert sorted(read) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


def test_older_layout_of_a_wrapper(tmp_path):
    # Gemma-3 as released: language_model.model.* and a tied head.
    expected = reference(tiny_target("gemma3", tmp_path, tie_word_embeddings=True))
    tensors = load_file(tmp_path / "model.safetensors")
    assert "language_model.model.norm.weight" in tensors
    renamed = {
        name.replace("language_model.model.", "model.language_model."): tensor for name, tensor in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    head = TargetHead.from_checkpoint(tmp_path)
    assert largest_error(head.hidden_to_logits(expected.last_hidden_BSH), expected.logits_BSV) < TOLERANCE


def test_a_tied_configuration_with_its_own_lm_head_follows_the_checkpoint(tmp_path):
    # transformers unties such a checkpoint if the two differ, and ties it if they do not.
    tiny_target("llama", tmp_path, tie_word_embeddings=True)
    embed_VH = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path, lm_head__weight=embed_VH.clone())
    twice = TargetHead.from_checkpoint(tmp_path)
    assert twice.lm_head_weight is twice.embed_weight
    rewrite(tmp_path, lm_head__weight=embed_VH.flip(0).contiguous())
    expected = reference(tmp_path)
    head = TargetHead.from_checkpoint(tmp_path)
    assert largest_error(head.hidden_to_logits(expected.last_hidden_BSH), expected.logits_BSV) < TOLERANCE


# --- Errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_a_missing_tensor_is_named(name, tmp_path):
    rewrite(tiny_target("llama", tmp_path), drop=(name,))
    with pytest.raises(InputError, match=name):
        TargetHead.from_checkpoint(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    tiny_target("llama", tmp_path, shard_size="20KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(InputError, match=lost.name):
        TargetHead.from_checkpoint(tmp_path)


def test_a_broken_index_is_named(tmp_path):
    tiny_target("llama", tmp_path, shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InputError, match=r"model\.safetensors\.index\.json is not a safetensors index"):
        TargetHead.from_checkpoint(tmp_path)


def test_a_truncated_file_is_named(tmp_path):
    path = tiny_target("llama", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model\.safetensors cannot be read"):
        TargetHead.from_checkpoint(tmp_path)


def test_a_head_with_a_bias_is_refused(tmp_path):
    rewrite(tiny_target("llama", tmp_path), lm_head__bias=torch.zeros(VOCAB_SIZE))
    with pytest.raises(InputError, match=r"lm_head\.bias"):
        TargetHead.from_checkpoint(tmp_path)


def test_a_quantised_head_is_refused(tmp_path):
    rewrite(tiny_target("llama", tmp_path), lm_head__weight=torch.zeros(VOCAB_SIZE, 32, dtype=torch.float8_e4m3fn))
    with pytest.raises(InputError, match=r"lm_head\.weight .* is quantised"):
        TargetHead.from_checkpoint(tmp_path)


def test_weights_of_another_size_are_refused(tmp_path):
    rewrite(tiny_target("llama", tmp_path), model__norm__weight=torch.ones(16))
    with pytest.raises(InputError, match=r"model\.norm\.weight has shape \(16,\)"):
        TargetHead.from_checkpoint(tmp_path)


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_an_unknown_family_is_no_llama_for_its_tensor_names(tmp_path):
    """Its own code says what it is: a final norm with a bias, here."""
    edit_config(tiny_target("llama", tmp_path), model_type="stablelm", architectures=["StableLmForCausalLM"])
    with pytest.raises(InputError, match=r"'stablelm'.*add an entry to FAMILIES in spectrain/target/families\.py"):
        TargetHead.from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("logit_scale", 0.5), ("final_logit_softcapping", 30.0), ("embedding_multiplier", 12.0)]
)
def test_a_scaling_field_that_the_family_does_not_read_is_an_error(field, value, tmp_path):
    edit_config(tiny_target("llama", tmp_path), **{field: value})
    with pytest.raises(InputError, match=f"{field}={value}"):
        TargetHead.from_checkpoint(tmp_path)


def test_a_scaling_field_that_does_nothing_is_no_error(tmp_path):
    edit_config(tiny_target("llama", tmp_path), logit_scale=1.0, final_logit_softcapping=None)
    assert TargetHead.from_checkpoint(tmp_path).vocab_size == VOCAB_SIZE


def test_a_head_in_bfloat16_sums_in_float32(tmp_path):
    """Against float64 products of the same rounded numbers: results are not rounded to bfloat16, one part in 256."""
    head = TargetHead.from_checkpoint(tiny_target("qwen3", tmp_path, tie_word_embeddings=False))
    last_hidden = torch.randn(7, head.hidden_size, generator=torch.Generator().manual_seed(3))
    plain = head.hidden_to_logits(last_hidden)
    normed = head.post_norm(last_hidden).bfloat16().double()
    head.held_in("bfloat16")
    assert head.lm_head_weight.dtype == head.embed_weight.dtype == torch.bfloat16
    found = head.hidden_to_logits(last_hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), normed @ head.lm_head_weight.double().T, rtol=1e-5, atol=1e-5)
    assert 1e-4 < largest_error(found, plain) < 0.02 * float(plain.abs().max())
    assert head.held_in("bfloat16").lm_head_weight is head.lm_head_weight


def test_tied_matrices_stay_one_in_bfloat16_and_tf32_changes_nothing_on_a_cpu(tmp_path):
    head = TargetHead.from_checkpoint(tiny_target("llama", tmp_path, tie_word_embeddings=True))
    last_hidden = torch.randn(3, head.hidden_size, generator=torch.Generator().manual_seed(4))
    plain, before = head.hidden_to_logits(last_hidden), torch.backends.cuda.matmul.allow_tf32
    assert torch.equal(head.held_in("tf32").hidden_to_logits(last_hidden), plain)
    assert torch.backends.cuda.matmul.allow_tf32 == before
    assert head.held_in("bfloat16").lm_head_weight is head.embed_weight
