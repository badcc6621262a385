"""Drafters that draft token by token: their training, their drafting."""

from mutation import Mutation

LOSSES = "tests/equivalence/test_eagle3_losses.py"
UNROLL = "tests/equivalence/test_eagle3_unroll.py"
DECODE = "tests/equivalence/test_eagle3_decode.py"
PACKING = "tests/equivalence/test_packing_invariance.py"
KEY_RANGES = "tests/unit/test_key_ranges.py"
INIT = "tests/unit/test_eagle3_init.py"
SIMULATION_LOOP = "tests/equivalence/test_simulation_equals_loop.py"
AUTOREGRESSIVE = "spectrain/drafters/autoregressive/"

MUTATIONS = (
    Mutation(
        "labels shifted by one",
        AUTOREGRESSIVE + "autoregressive_drafter.py",
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
        "position_M = batch.position_ids_T[query_M] + step",
        "position_M = batch.position_ids_T[query_M] + step + 1",
        (UNROLL,),
    ),
    Mutation(
        "a later step stays at its column's position (drafting)",
        AUTOREGRESSIVE + "autoregressive_drafter.py",
        "cos_sin = rotary.cos_sin(slots_BT)",
        "cos_sin = rotary.cos_sin(torch.minimum(slots_BT, cache.columns_B[:, None]) if slots_BT.shape[1] == 1 else "
        "slots_BT)",
        (DECODE,),
    ),
    Mutation(
        "P-EAGLE: mask slots hold the last feature (training)",
        AUTOREGRESSIVE + "peagle.py",
        "        stream, embedding_H = self._mask_input()\n",
        "        stream, embedding_H = self._mask_input()\n"
        "        stream = body.fuse(batch.taps_TAH)[query_M]\n"
        "        embedding_H = embedding_H.expand_as(stream)\n",
        (UNROLL,),
    ),
    Mutation(
        "P-EAGLE: mask slots hold the last feature (drafting)",
        AUTOREGRESSIVE + "peagle.py",
        "body.mask_feature().to(cache.pending_BH).expand(rows, masks, -1)",
        "cache.pending_BH[:, None].expand(rows, masks, -1)",
        (DECODE,),
    ),
    Mutation(
        "P-EAGLE: mask slots sit one position too far (training)",
        AUTOREGRESSIVE + "peagle.py",
        "torch.arange(1, len(columns.valid_KM), device=query_M.device)[:, None]",
        "torch.arange(1, len(columns.valid_KM), device=query_M.device)[:, None] + 1",
        (UNROLL,),
    ),
    Mutation(
        "P-EAGLE: slot 0 holds the mask token (drafting)",
        AUTOREGRESSIVE + "peagle.py",
        "[anchor_B[:, None], anchor_B.new_full(",
        "[anchor_B.new_full((rows, 1), drafter.shape.mask_token_id), anchor_B.new_full(",
        (DECODE,),
    ),
    Mutation(
        "P-EAGLE: a mask slot does not see those before it (training)",
        AUTOREGRESSIVE + "peagle.py",
        "k_J[: j + 1], v_J[: j + 1]",
        "k_J[j : j + 1], v_J[j : j + 1]",
        (UNROLL,),
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
        AUTOREGRESSIVE + "autoregressive_drafter.py",
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
        "embedding_TH = token_embedding(body, head, next_T, batch.position_ids_T)",
        "embedding_TH = head.embed(next_T)",
        (UNROLL,),
    ),
    Mutation(
        "drafts left as draft ids",
        AUTOREGRESSIVE + "autoregressive_drafter.py",
        "steps.token_B = self.draft_ids_D[draft_B]",
        "steps.token_B = draft_B",
        (DECODE,),
    ),
    Mutation(
        "later steps' keys seen by other columns (sdpa)",
        AUTOREGRESSIVE + "column_attention.py",
        "diagonal = torch.eye(len(visible), dtype=torch.bool, device=visible.device)",
        "diagonal = torch.ones(len(visible), len(visible), dtype=torch.bool, device=visible.device).tril()",
        ("tests/unit/test_attention.py",),
    ),
    Mutation(
        "later steps' keys of another column (eager)",
        AUTOREGRESSIVE + "column_attention.py",
        "keys_MGkd = torch.stack(own_k, dim=2)",
        "keys_MGkd = torch.stack(own_k, dim=2).roll(1, 0)",
        ("tests/unit/test_attention.py",),
    ),
    Mutation(
        "a column sees the one behind it",
        AUTOREGRESSIVE + "column_attention.py",
        "hidden = columns[None] > query_q1",
        "hidden = columns[None] > query_q1 + 1",
        (PACKING,),
    ),
    Mutation(
        "a part of a long document lacks its last key",
        AUTOREGRESSIVE + "column_attention.py",
        "int(query_M[end - 1]) + 1, start, end, True)",
        "max(int(query_M[end - 1]), self.key_start + 1), start, end, True)",
        ("tests/unit/test_attention.py",),
    ),
    Mutation(
        "a window stays where the draft began",
        AUTOREGRESSIVE + "column_attention.py",
        "(columns[None] <= query_q1 + self.step - self.window)",
        "(columns[None] <= query_q1 - self.window)",
        ("tests/unit/test_attention.py",),
    ),
    Mutation(
        "a draft's own keys are not in the window",
        AUTOREGRESSIVE + "column_attention.py",
        "own_k, own_v = own_k[-layout.window :], own_v[-layout.window :]",
        "pass",
        ("tests/unit/test_attention.py",),
    ),
    Mutation(
        "a window is a token longer when drafting than in training",
        AUTOREGRESSIVE + "autoregressive_drafter.py",
        "(slot_S > slots_BT[..., None] - body.window)",
        "(slot_S >= slots_BT[..., None] - body.window)",
        ("tests/equivalence/test_eagle3_decode.py",),
    ),
    Mutation(
        "a folder does not say that its layers slide",
        AUTOREGRESSIVE + "eagle3.py",
        "({} if shape.sliding_window is None else sliding_layers(shape.num_layers, shape.sliding_window))",
        "{}",
        ("tests/unit/test_drafter_folder.py",),
    ),
    Mutation(
        "a tile of which something is seen counts as seen whole (flex)",
        "spectrain/drafters/key_ranges.py",
        "full_IJ = all_IJ == BLOCK",
        "full_IJ = some_IJ == BLOCK",
        (KEY_RANGES,),
    ),
    Mutation(
        "the tile with a range's last key is left out (flex)",
        "spectrain/drafters/key_ranges.py",
        "(end_Q[seen_Q] - 1) // BLOCK + 1)",
        "end_Q[seen_Q] // BLOCK)",
        (KEY_RANGES,),
    ),
    Mutation(
        "a shape too many falls back to all scores",
        "spectrain/drafters/flex_kernels.py",
        "recompile_limit=MOST_GRAPHS, fail_on_recompile_limit_hit=True",
        "recompile_limit=64",
        (KEY_RANGES,),
    ),
    Mutation(
        "step weights forgotten",
        AUTOREGRESSIVE + "unroll.py",
        "return decay_K[:, None] * self.valid_KM",
        "return torch.ones_like(decay_K)[:, None] * self.valid_KM",
        (LOSSES,),
    ),
    Mutation(
        "simulated scores shifted by one slot",
        AUTOREGRESSIVE + "autoregressive_drafter.py",
        "accept_KU[k, index_T[anchor_R + k]]",
        "accept_KU[k, index_T[anchor_R]]",
        (SIMULATION_LOOP,),
    ),
    Mutation(
        "the feature is moved as if it had been nowhere",
        AUTOREGRESSIVE + "eagle3_init.py",
        "missing_IH = wanted_IH - fc_IH @ step_HH",
        "missing_IH = wanted_IH",
        (INIT,),
    ),
    Mutation(
        "keys say which token a column holds, not which one came before",
        AUTOREGRESSIVE + "eagle3_init.py",
        "text.embeddings(batch, t_P)) - mean_H",
        "text.embeddings(batch, t_P + 1)) - mean_H",
        (INIT,),
    ),
    Mutation(
        "attention's output is solved for as if there were no residual stream",
        AUTOREGRESSIVE + "eagle3_init.py",
        "weight * (y_PH - residual_PH)",
        "weight * y_PH",
        (INIT,),
    ),
)
