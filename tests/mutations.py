"""Do the tests see the classic bugs? Breaks a copy of the package in one place at a time and runs the tests that should
notice.

Usage: ``python tests/mutations.py [PART]``: a part of their names, or of the paths of the files they break. Prints one
line a mutation; exit status 1 if any survives or no longer applies. Each is a bug that a trainer or server of drafters
has shipped, or a switch that is easily turned the wrong way.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# Imported once for all; every forked test run starts with them.
import accelerate  # noqa: F401
import hypothesis  # noqa: F401
import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600


@dataclass(frozen=True)
class Mutation:
    """``old`` must occur exactly once in ``file`` and becomes ``new``. ``tests``: what should fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


BLOCK, BLOCK_TRAINING = "spectrain/drafters/block/", "tests/equivalence/test_block_training.py"
BLOCK_LOSSES, BLOCK_DECODE = "tests/equivalence/test_block_losses.py", "tests/equivalence/test_block_decode.py"
BLOCK_FOLDER = "tests/unit/test_block_folder.py"
LOSSES, UNROLL = "tests/equivalence/test_eagle3_losses.py", "tests/equivalence/test_eagle3_unroll.py"
DECODE, PACKING = "tests/equivalence/test_eagle3_decode.py", "tests/equivalence/test_packing_invariance.py"
ACCUMULATION, RESUME = "tests/equivalence/test_accumulation.py", "tests/equivalence/test_resume.py"
SIMULATION_LOOP = "tests/equivalence/test_simulation_equals_loop.py"
AUTOREGRESSIVE, TRAINING = "spectrain/drafters/autoregressive/", "spectrain/training/"

MUTATIONS = (
    Mutation(
        "labels shifted by one",
        AUTOREGRESSIVE + "eagle3_drafter.py",
        "self.target_to_draft_V[batch.input_ids_T[students.teacher_U + 1]]",
        "self.target_to_draft_V[batch.input_ids_T[students.teacher_U]]",
        (LOSSES,),
    ),
    Mutation(
        "loss mask not shifted with the token taken in",
        AUTOREGRESSIVE + "unroll.py",
        "batch.loss_mask_T[1 : reach + 1] &",
        "batch.loss_mask_T[:reach] &",
        (LOSSES,),
    ),
    Mutation(
        "loss mask not shifted with the token predicted",
        AUTOREGRESSIVE + "unroll.py",
        "& batch.loss_mask_T[ahead:] &",
        "& batch.loss_mask_T[ahead - 1 : -1] &",
        (LOSSES,),
    ),
    Mutation(
        "documents not told apart by what counts",
        AUTOREGRESSIVE + "unroll.py",
        "batch.loss_mask_T[ahead:] & same",
        "batch.loss_mask_T[ahead:]",
        (UNROLL,),
    ),
    Mutation(
        "a later step takes in its own label",
        AUTOREGRESSIVE + "unroll.py",
        "batch.input_ids_T[(query_M + 1 + step)",
        "batch.input_ids_T[(query_M + 2 + step)",
        (UNROLL,),
    ),
    Mutation(
        "a later step sits one position too far (training)",
        AUTOREGRESSIVE + "unroll.py",
        "batch.position_ids_T[query_M] + step)",
        "batch.position_ids_T[query_M] + step + 1)",
        (UNROLL,),
    ),
    Mutation(
        "a later step stays at its column's position (drafting)",
        AUTOREGRESSIVE + "draft_steps.py",
        "cos_sin = rotary.cos_sin(slots_BT)",
        "cos_sin = rotary.cos_sin(torch.minimum(slots_BT, cache.columns_B[:, None]) if slots_BT.shape[1] == 1 else "
        "slots_BT)",
        (DECODE,),
    ),
    Mutation(
        "teacher one position early",
        "spectrain/drafters/base.py",
        "last_hidden_UH=batch.last_hidden_TH[teacher_U]",
        "last_hidden_UH=batch.last_hidden_TH[teacher_U - 1]",
        (LOSSES,),
    ),
    Mutation(
        "students brought to the wrong teacher",
        AUTOREGRESSIVE + "unroll.py",
        "position_U = teacher_U - 1 - k",
        "position_U = teacher_U - 1",
        (LOSSES,),
    ),
    Mutation(
        "drafting leaves its columns in the cache",
        AUTOREGRESSIVE + "draft_steps.py",
        "        self._step += 1\n",
        "        self._step += 1\n        cache.columns_B = cache.columns_B + (self._step == self._n)\n",
        (DECODE,),
    ),
    Mutation(
        "residual flag turned round",
        AUTOREGRESSIVE + "eagle3.py",
        "residual = normed if self.norm_before_residual else feature",
        "residual = feature if self.norm_before_residual else normed",
        (UNROLL,),
    ),
    Mutation(
        "post-norm output fed back always",
        AUTOREGRESSIVE + "eagle3.py",
        "return normed if self.shape.norm_output else output",
        "return normed",
        (UNROLL,),
    ),
    Mutation(
        "embedding half and feature half exchanged",
        AUTOREGRESSIVE + "eagle3.py",
        "torch.cat([self.input_layernorm(embedding), normed], dim=-1)",
        "torch.cat([normed, self.input_layernorm(embedding)], dim=-1)",
        (UNROLL,),
    ),
    Mutation(
        "embeddings scaled as in the target's own stream",
        AUTOREGRESSIVE + "unroll.py",
        "embedding_TH = head.embed_rows(next_T)",
        "embedding_TH = head.embed(next_T)",
        (UNROLL,),
    ),
    Mutation(
        "drafts left as draft ids",
        AUTOREGRESSIVE + "eagle3_drafter.py",
        "steps.token_B = self.draft_ids_D[draft_B]",
        "steps.token_B = draft_B",
        (DECODE,),
    ),
    Mutation(
        "target ids stored where offsets belong",
        "spectrain/drafters/drafter_folder.py",
        'tensors["d2t"] = drafter.vocab.d2t()',
        'tensors["d2t"] = drafter.vocab.ids_D.clone()',
        ("tests/unit/test_drafter_folder.py",),
    ),
    Mutation(
        "rotary frequencies rounded with the weights",
        "spectrain/drafters/layers.py",
        "phase = positions.float()[..., None] * self.inv_freq",
        "phase = positions.float()[..., None] * self.inv_freq.bfloat16().float()",
        ("tests/unit/test_drafter_folder.py",),
    ),
    Mutation(
        "later steps' keys seen by other columns (sdpa)",
        "spectrain/drafters/autoregressive/unroll_attention.py",
        "diagonal = torch.eye(m, dtype=torch.bool, device=visible.device)",
        "diagonal = torch.ones(m, m, dtype=torch.bool, device=visible.device).tril()",
        ("tests/unit/test_attention.py",),
    ),
    Mutation(
        "later steps' keys of another column (eager)",
        "spectrain/drafters/autoregressive/unroll_attention.py",
        "keys_MGkd = torch.stack(own_k, dim=2)",
        "keys_MGkd = torch.stack(own_k, dim=2).roll(1, 0)",
        ("tests/unit/test_attention.py",),
    ),
    Mutation(
        "a column sees the one behind it",
        "spectrain/drafters/autoregressive/unroll_attention.py",
        "hidden = columns[None] > layout.query_M[q_start:q_end, None]",
        "hidden = columns[None] > layout.query_M[q_start:q_end, None] + 1",
        (PACKING,),
    ),
    Mutation(
        "draft vocabulary's teacher renormalised",
        "spectrain/drafters/losses/fused.py",
        "log_normalizer_C = self.log_normalizer_U[part]",
        "log_normalizer_C = logits_CD.logsumexp(-1)",
        ("tests/unit/test_losses.py",),
    ),
    Mutation(
        "step weights forgotten",
        AUTOREGRESSIVE + "unroll.py",
        "return decay_K[:, None] * self.valid_KM",
        "return torch.ones_like(decay_K)[:, None] * self.valid_KM",
        (LOSSES,),
    ),
    Mutation(
        "tap one layer early",
        "spectrain/target/model.py",
        "module = self._layers[tap] if tap < self.spec.num_layers else self._final_norm",
        "module = self._layers[max(tap - 1, 0)]",
        ("tests/unit/test_target_model.py",),
    ),
    Mutation(
        "tap one layer late",
        "spectrain/target/model.py",
        "module = self._layers[tap] if tap < self.spec.num_layers else self._final_norm",
        "module = self._layers[tap + 1] if tap + 1 < self.spec.num_layers else self._final_norm",
        ("tests/unit/test_target_model.py",),
    ),
    Mutation(
        "post-norm state taken for the last tap",
        "spectrain/target/model.py",
        "            self.taps_BSAH[:, :, slot] = hidden_BSH\n",
        '            self.taps_BSAH[:, :, slot] = module(hidden_BSH) if "Norm" in type(module).__name__ else '
        'hidden_BSH\n',
        ("tests/unit/test_target_model.py",),
    ),
    Mutation(
        "post-norm state taken for the last hidden state",
        "spectrain/target/model.py",
        "self._final_norm.register_forward_pre_hook(recorder.last_hidden_hook)",
        "self._final_norm.register_forward_hook(lambda module, args, out: recorder.last_hidden_hook(module, (out,)))",
        ("tests/unit/test_target_model.py",),
    ),
    Mutation(
        "final norm without its (1 + w)",
        "spectrain/target/families.py",
        "(hidden * (1.0 + gain if self.family.one_plus else gain))",
        "(hidden * gain)",
        ("tests/unit/test_losses.py",),
    ),
    Mutation(
        "soft-cap left out of the teacher",
        "spectrain/target/families.py",
        "if self.soft_cap is not None:",
        "if False:",
        ("tests/unit/test_losses.py",),
    ),
    Mutation(
        "no residual after a rejection",
        "spectrain/decoding/verify.py",
        "weights_BV = torch.where(use_residual_B[:, None], residual_BV, q_BV)",
        "weights_BV = q_BV",
        ("tests/unit/test_verify.py",),
    ),
    Mutation(
        "target's cache not cropped",
        "spectrain/target/kv_cache.py",
        "self._lengths = [length + count for length, count in zip(self._lengths, counts_B, strict=True)]",
        "self._lengths = [length + self._write.slots.shape[1] for length in self._lengths]",
        ("tests/equivalence/test_greedy_loop.py",),
    ),
    Mutation(
        "scheduler looks past the first fall",
        "spectrain/decoding/scheduler.py",
        "            break\n        throughput = now\n",
        "            if now < 0.5 * throughput:\n                break\n        throughput = max(now, throughput)\n",
        ("tests/unit/test_confidence.py",),
    ),
    Mutation(
        "threshold on a draft's own confidence",
        "spectrain/decoding/draft_policy.py",
        "survival_Bn = survival(confidence_Bn)",
        "survival_Bn = confidence_Bn",
        ("tests/unit/test_confidence.py",),
    ),
    Mutation(
        "each slot calibrated by itself",
        "spectrain/decoding/confidence.py",
        "        before_R = before_R * _sigmoid(",
        "        _ = before_R * _sigmoid(",
        ("tests/unit/test_confidence.py",),
    ),
    Mutation(
        "calibration inverted",
        "spectrain/decoding/confidence.py",
        "return _sigmoid(_logit(confidence_Rn) / np",
        "return _sigmoid(_logit(confidence_Rn) * np",
        ("tests/unit/test_confidence.py",),
    ),
    Mutation(
        "confidence calibrated at all positions instead of the simulation's rounds",
        "spectrain/decoding/confidence_samples.py",
        "anchors_R = np.array([round_.anchor - span.start for round_ in simulate(span, n, rng)], dtype=np.int64)",
        "anchors_R = np.arange(len(span.accept) - 1)",
        ("tests/unit/test_confidence_samples.py",),
    ),
    Mutation(
        'last hidden state shown before the final norm',
        'spectrain/decoding/proposers.py',
        'normed = target.post_norm(output.last_hidden_BSH) if',
        'normed = output.last_hidden_BSH if',
        ('tests/equivalence/test_greedy_loop.py',),
    ),
    Mutation(
        'last hidden state replayed before the final norm',
        'spectrain/evaluation/replay.py',
        'return self.target.post_norm(self._output[0])',
        'return self._output[0]',
        ('tests/unit/test_parity.py',),
    ),
    Mutation(
        'near-ties of the target looked up one position late',
        'spectrain/evaluation/replay.py',
        'self._output[0][0, position]',
        'self._output[0][0, position + 1]',
        ('tests/unit/test_parity.py',),
    ),
    Mutation(
        'rounds that the length limit cut are counted',
        'spectrain/decoding/acceptance.py',
        'complete = [[r for r in rounds if not r.cut] for rounds in rounds_per_prompt]',
        'complete = [list(rounds) for rounds in rounds_per_prompt]',
        ('tests/unit/test_acceptance.py',),
    ),
    Mutation(
        "random numbers of a row depend on its neighbours' drafts",
        'spectrain/decoding/loop.py',
        'most = self.settings.num_speculative_tokens + 1',
        'most = draft_ids.shape[1] + 1',
        ('tests/equivalence/test_sampled_loop.py',),
    ),
    Mutation(
        'one random stream for all prompts',
        'spectrain/decoding/loop.py',
        'index if prompt.stream is None else prompt.stream',
        '0 if prompt.stream is None else prompt.stream',
        ('tests/equivalence/test_sampled_loop.py',),
    ),
    Mutation(
        "speed-up against another prompt's baseline",
        'spectrain/evaluation/records.py',
        'return [by_key[result.key] for result in results]',
        'return list(baseline)',
        ('tests/unit/test_records.py',),
    ),
    Mutation(
        'records of two draft policies under one name',
        'spectrain/evaluation/records.py',
        'if draft_policy != "fixed":',
        'if draft_threshold is not None:',
        ('tests/unit/test_records.py',),
    ),
    Mutation(
        'recommendation from rounds that a policy cut short',
        'spectrain/evaluation/recommend.py',
        ' and record.draft_policy == "fixed"',
        '',
        ('tests/unit/test_recommend.py',),
    ),
    Mutation(
        "all drafts verified whatever the policy",
        "spectrain/decoding/loop.py",
        "return proposal if self.settings.policy is None else _shortened(proposal, self.settings.policy)",
        "return proposal",
        ("tests/equivalence/test_draft_policies.py",),
    ),
    Mutation(
        "rows of different lengths written to the wrong slots",
        "spectrain/target/kv_cache.py",
        "rows_R, slots_R = write.places // write.slots.shape[1], write.slots.flatten()[write.places]",
        "rows_R, slots_R = write.places // write.slots.shape[1], write.slots.flatten()[: len(write.places)]",
        ("tests/unit/test_kv_cache.py",),
    ),
    Mutation(
        "simulation jumps over the accepted tokens only",
        "spectrain/decoding/simulate.py",
        "anchor += accepted + 1",
        "anchor += max(accepted, 1)",
        (SIMULATION_LOOP,),
    ),
    Mutation(
        "simulated scores shifted by one slot",
        AUTOREGRESSIVE + "eagle3_drafter.py",
        "accept_KU[k, index_T[anchor_R + k]]",
        "accept_KU[k, index_T[anchor_R]]",
        (SIMULATION_LOOP,),
    ),
    Mutation(
        "simulation against the target's whole distribution, not the truncated one",
        "spectrain/drafters/teacher_forced.py",
        "log_q_CV = truncated_log_probs(teacher.head.hidden_to_logits(teacher.last_hidden_UH[part]), sampling)",
        "log_q_CV = teacher.head.hidden_to_logits(teacher.last_hidden_UH[part]).log_softmax(-1)",
        (SIMULATION_LOOP,),
    ),
    Mutation(
        "a block sees its anchor's own taps",
        BLOCK + "block_attention.py",
        "visible = column_K < anchor_r11",
        "visible = column_K <= anchor_r11",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "a block's window one too wide",
        BLOCK + "block_attention.py",
        "(anchor_r11 + slot_B1 - column_K < self.window)",
        "(anchor_r11 + slot_B1 - column_K <= self.window)",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "slot 0 of a block is the mask token",
        BLOCK + "block_model.py",
        "ids_RB[:, 0] = anchor_R",
        "pass",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "a block's positions begin at a + 1",
        BLOCK + "block_training.py",
        "batch.position_ids_T[anchor_R][:, None] + slot_B)",
        "batch.position_ids_T[anchor_R][:, None] + slot_B + 1)",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "a block's labels shifted by one",
        BLOCK + "block_training.py",
        "target_U = batch.input_ids_T[counted.teacher_U + 1]",
        "target_U = batch.input_ids_T[counted.teacher_U]",
        (BLOCK_LOSSES,),
    ),
    Mutation(
        "a block's loss mask unshifted",
        BLOCK + "anchors.py",
        "going_T = going_T[: t - k] & batch.loss_mask_T[k:] & same",
        "going_T = going_T[: t - k] & batch.loss_mask_T[k - 1 : t - 1] & same",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "a block runs on into the next document",
        BLOCK + "anchors.py",
        "same = batch.document_ids_T[: t - k] == batch.document_ids_T[k:]",
        "same = batch.document_ids_T[: t - k] >= 0",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "the Markov head reads the token it predicts",
        BLOCK + "block_training.py",
        "markov.embed(batch.input_ids_T[counted.teacher_U])",
        "markov.embed(batch.input_ids_T[counted.teacher_U + 1])",
        (BLOCK_LOSSES,),
    ),
    Mutation(
        "the confidence head's loss leaks into the backbone",
        BLOCK + "block_training.py",
        "    if options.confidence_detach:",
        "    if False:",
        (BLOCK_LOSSES,),
    ),
    Mutation(
        "anchors stay the same at every step",
        BLOCK + "anchors.py",
        "np.random.default_rng((draw.seed, draw.step, number))",
        "np.random.default_rng((draw.seed, 0, number))",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "a block sees its anchor's own taps (flex)",
        BLOCK + "block_attention.py",
        "& (column < anchor) &",
        "& (column <= anchor) &",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "a block sees what lies behind its cache's end (drafting)",
        BLOCK + "block_decode.py",
        "(column_K < columns_B[:, None, None])",
        "(column_K <= columns_B[:, None, None])",
        (BLOCK_DECODE,),
    ),
    Mutation(
        "a block's positions begin at a + 1 (drafting)",
        BLOCK + "block_decode.py",
        "cache.columns_B[:, None] + torch.arange(slots, device=anchor_B.device)",
        "cache.columns_B[:, None] + torch.arange(slots, device=anchor_B.device) + 1",
        (BLOCK_DECODE,),
    ),
    Mutation(
        "rejected drafts stay in a block drafter's cache",
        BLOCK + "block_decode.py",
        "cache.columns_B = cache.columns_B + lengths_B",
        "cache.columns_B = cache.columns_B + taps_BTAH.shape[1]",
        (BLOCK_DECODE,),
    ),
    Mutation(
        "a block's context normed again in each layer",
        BLOCK + "block_model.py",
        "self.self_attn.keys_values(context_TH, cos_sin_T)",
        "self.self_attn.keys_values(self.input_layernorm(context_TH), cos_sin_T)",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "a block's teacher one position early",
        BLOCK + "block_training.py",
        "by_teacher(anchor_R[block_S] + place_S)",
        "by_teacher(anchor_R[block_S] + place_S - 1)",
        (BLOCK_LOSSES,),
    ),
    Mutation(
        "heads of a block read the token they predict",
        BLOCK + "block_training.py",
        "(anchor_R[:, None] + place_J).clamp",
        "(anchor_R[:, None] + place_J + 1).clamp",
        (BLOCK_LOSSES,),
    ),
    Mutation(
        "a block's Markov head reads the token before the last (drafting)",
        BLOCK + "block_drafter.py",
        "self.body.markov_head.embed(self.prev_B)",
        "self.body.markov_head.embed(self.ids[-2] if len(self.ids) > 1 else self.prev_B)",
        (BLOCK_DECODE,),
    ),
    Mutation(
        "a block's drafts drawn from another distribution than is reported",
        BLOCK + "block_drafter.py",
        "sample(log_p.exp(), uniform_B)",
        "sample(scores.logits.softmax(-1), uniform_B)",
        (BLOCK_DECODE,),
    ),
    Mutation(
        "a block's simulate asks the anchor's distribution for every slot",
        BLOCK + "block_scores.py",
        "else log_q_T[teacher_S]",
        "else log_q_T[anchor_R[alive_S]]",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "a block's simulate hears the opposite confidence",
        BLOCK + "block_scores.py",
        "else logits_RJ.sigmoid()",
        "else 1 - logits_RJ.sigmoid()",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "a block's slots weigh their own survival alone (D-PACE)",
        BLOCK + "block_training.py",
        "survival_RJ.flip(-1).cumsum(-1).flip(-1)",
        "survival_RJ",
        (BLOCK_LOSSES,),
    ),
    Mutation(
        "a block's convolution mixes with the wrong side",
        BLOCK + "conv.py",
        "dynamic_RB2KC[:, :, 1]",
        "dynamic_RB2KC[:, :, 0]",
        (BLOCK_DECODE,),
    ),
    Mutation(
        "a block's anchors drawn by the place in the row",
        BLOCK + "anchors.py",
        "(draw.seed, draw.step, number)",
        "(draw.seed, draw.step, index)",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "ids of a block's taps written one too low",
        BLOCK + "block_folder.py",
        "list(shape.taps)",
        "[tap - 1 for tap in shape.taps]",
        (BLOCK_FOLDER,),
    ),
    Mutation(
        "the simulation scores a longer block than the server runs",
        TRAINING + "simulated_acceptance.py",
        "drafter.score(placed, shown, sampling, draft_sampling)",
        "drafter.score(placed, most, sampling, draft_sampling)",
        ("tests/equivalence/test_block_simulation.py",),
    ),
    Mutation(
        "ranks' gradients averaged once too often",
        TRAINING + "trainer.py",
        "scale = self.accelerator.num_processes / sums.weight",
        "scale = 1.0 / sums.weight",
        (ACCUMULATION,),
    ),
    Mutation(
        "mean of micro-batch means",
        TRAINING + "trainer.py",
        "self.accelerator.backward(losses.loss)",
        "self.accelerator.backward(losses.loss / losses.weight.clamp(min=1e-9) * 10)",
        (ACCUMULATION,),
    ),
    Mutation(
        "optimiser moves before the check",
        TRAINING + "trainer.py",
        "        self._check(step, sums)\n",
        "        for optimizer in self.optimizers:\n            optimizer.step()\n        self._check(step, sums)\n",
        ("tests/unit/test_trainer.py::test_a_loss_that_is_not_finite_stops_before_the_optimiser",),
    ),
    Mutation(
        "best drafter is the latest",
        TRAINING + "trainer.py",
        'if not length <= self.best["acceptance_length"]:',
        "if True:",
        ("tests/unit/test_trainer.py::test_a_worse_drafter_never_replaces_a_better_one",),
    ),
    Mutation(
        "optimiser state not restored",
        TRAINING + "checkpointing.py",
        "    _restore_optimizers(model, optimizers, load_file(path / \"optimizer.safetensors\"), path)\n",
        "",
        (RESUME,),
    ),
    Mutation(
        "metrics of repeated steps kept twice",
        TRAINING + "trainer.py",
        'if entry["step"] <= step and',
        'if entry["step"] <= 10**9 and',
        (RESUME,),
    ),
    Mutation(
        "the tail of an epoch dropped",
        TRAINING + "sampler.py",
        "self.steps_per_epoch.append(-(-len(self._micro[-1]) // per_step))",
        "self.steps_per_epoch.append(max(1, len(self._micro[-1]) // per_step))",
        ("tests/unit/test_sampler.py",),
    ),
    Mutation(
        "a rank without rows sits a pass out",
        TRAINING + "sampler.py",
        "mine = [block[i] if i < len(block) else [] for i in range(self._rank, per_step, self._world)]",
        "mine = [block[i] for i in range(self._rank, len(block), self._world)]",
        ("tests/unit/test_sampler.py",),
    ),
    Mutation(
        "z-lab's layer ids read as ours",
        "spectrain/drafters/foreign_checkpoints.py",
        """return _taps(section["target_layer_ids"], 1, field, where)""",
        """return _taps(section["target_layer_ids"], 0, field, where)""",
        ("tests/unit/test_foreign_checkpoints.py",),
    ),
    Mutation(
        "a speculators folder that is silent about norm_before_residual",
        "spectrain/drafters/foreign_checkpoints.py",
        """"eagle3": {"norm_before_residual": True,""",
        """"eagle3": {"norm_before_residual": False,""",
        ("tests/unit/test_foreign_checkpoints.py",),
    ),
    Mutation(
        "an embedding of another target is taken for the target's",
        "spectrain/drafters/foreign_checkpoints.py",
        "return difference <= _ROUNDING**2 * total",
        "return True",
        ("tests/unit/test_foreign_checkpoints.py",),
    ),
)  # fmt: skip


def run_tests(folder: str, tests: tuple[str, ...], output: str) -> None:
    """In a forked process: pytest on the broken copy. The heavy libraries came with the fork, the package and the tests
    did not.
    """
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry not in ("", str(ROOT), str(ROOT / "tests")))]
    os._exit(pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]))


def pytest_in(folder: Path, tests: tuple[str, ...]) -> tuple[int | None, str, float]:
    """Exit status of pytest in a forked process (None: it hung and was ended), its output, and seconds."""
    started, log = time.monotonic(), folder / "pytest.log"
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(str(folder), tests, str(log)))
    process.start()
    process.join(TIMEOUT_S)
    hung = process.is_alive()
    if hung:
        process.kill()
        process.join()
    output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return None if hung else process.exitcode, output, time.monotonic() - started


def verdict(mutation: Mutation, folder: Path) -> tuple[str, float]:
    """``killed by TEST``, or what is wrong with the mutation, and seconds."""
    file = folder / mutation.file
    source = file.read_text(encoding="utf-8")
    if source.count(mutation.old) != 1:
        return f"STALE: its text occurs {source.count(mutation.old)} times in {mutation.file}", 0.0
    file.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    status, output, seconds = pytest_in(folder, mutation.tests)
    file.write_text(source, encoding="utf-8")
    failed = next((line.removeprefix("FAILED ") for line in output.splitlines() if line.startswith("FAILED")), None)
    if status is None:
        return "killed by hanging", seconds
    if status == 0:
        return "SURVIVED", seconds
    if failed is None:
        return f"BROKEN: {output[-300:]}", seconds  # an error at import proves nothing
    return f"killed by {failed.split(' - ')[0]}", seconds


def main(part: str = "") -> int:
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    _ = (
        transformers.AutoModelForCausalLM,
        transformers.LlamaForCausalLM,
        transformers.PreTrainedTokenizerFast,
    )  # lazy modules
    chosen = [mutation for mutation in MUTATIONS if part in mutation.name or part in mutation.file]
    if not chosen:
        print(
            f"no mutation has {part!r} in its name or file; they are: "
            f"{', '.join(mutation.name for mutation in MUTATIONS)}"
        )
        return 2
    alive = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = Path(name)
        for tree in ("spectrain", "tests"):
            shutil.copytree(ROOT / tree, folder / tree, ignore=shutil.ignore_patterns("__pycache__"))
        for tree in ("conf", "data_gen", "recipes", "eval", "pyproject.toml"):
            (folder / tree).symlink_to(ROOT / tree)
        status, output, seconds = pytest_in(
            folder, tuple(sorted({test for mutation in chosen for test in mutation.tests}))
        )
        if status != 0:
            print(f"the tests fail without any mutation:\n{output[-3000:]}")
            return 1
        print(f"{'(nothing broken)':58} passes  ({seconds:.0f} s)", flush=True)
        for mutation in chosen:
            outcome, seconds = verdict(mutation, folder)
            alive += not outcome.startswith("killed")
            print(f"{mutation.name:58} {outcome}  ({seconds:.0f} s)", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
