"""Drafters that draft a block at once."""

from mutation import Mutation

BLOCK = "spectrain/drafters/block/"
BLOCK_TRAINING = "tests/equivalence/test_block_training.py"
BLOCK_LOSSES = "tests/equivalence/test_block_losses.py"
BLOCK_DECODE = "tests/equivalence/test_block_decode.py"
BLOCK_FOLDER = "tests/unit/test_block_drafter_folder.py"

MUTATIONS = (
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
        BLOCK + "block_training.py",
        "going_T = going_T[: t - k] & host.loss_mask_T[k:] & same",
        "going_T = going_T[: t - k] & host.loss_mask_T[k - 1 : t - 1] & same",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "a block runs on into the next document",
        BLOCK + "block_training.py",
        "same = host.document_ids_T[: t - k] == host.document_ids_T[k:]",
        "same = host.document_ids_T[: t - k] >= 0",
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
        BLOCK + "block_training.py",
        "np.random.default_rng((draw.seed, draw.step, number))",
        "np.random.default_rng((draw.seed, 0, number))",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "a block sees its anchor's own taps (flex)",
        BLOCK + "block_attention.py",
        "np.stack([anchor_Q, block_Q + last_Q + 1])",
        "np.stack([anchor_Q + 1, block_Q + last_Q + 1])",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "the host counts teachers' students on the device",
        BLOCK + "block_training.py",
        "return values_U[on_device(teacher_S, values_U.device)]",
        "return values_U.repeat_interleave(torch.tensor(self.counts_U))",
        ("tests/unit/test_host_synchronisations.py",),
    ),
    Mutation(
        "a block sees what lies behind its cache's end (drafting)",
        BLOCK + "block_drafter.py",
        "(column_K < columns_B[:, None, None])",
        "(column_K <= columns_B[:, None, None])",
        (BLOCK_DECODE,),
    ),
    Mutation(
        "a block's positions begin at a + 1 (drafting)",
        BLOCK + "block_drafter.py",
        "cache.columns_B[:, None] + torch.arange(slots, device=anchor_B.device)",
        "cache.columns_B[:, None] + torch.arange(slots, device=anchor_B.device) + 1",
        (BLOCK_DECODE,),
    ),
    Mutation(
        "rejected drafts stay in a block drafter's cache",
        BLOCK + "block_drafter.py",
        "cache.columns_B = cache.columns_B + observation.lengths_B",
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
        "by_teacher(anchors[block_S] + draft_S)",
        "by_teacher(anchors[block_S] + draft_S - 1)",
        (BLOCK_LOSSES,),
    ),
    Mutation(
        "heads of a block read the token they predict",
        BLOCK + "block_training.py",
        "(anchor_R[:, None] + draft_J).clamp",
        "(anchor_R[:, None] + draft_J + 1).clamp",
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
        BLOCK + "block_drafter.py",
        "else log_q_T[teacher_S]",
        "else log_q_T[anchor_R[alive_S]]",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "a block's simulate hears the opposite confidence",
        BLOCK + "block_drafter.py",
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
        BLOCK + "heads.py",
        "dynamic_RB2KC[:, :, 1]",
        "dynamic_RB2KC[:, :, 0]",
        (BLOCK_DECODE,),
    ),
    Mutation(
        "a block's anchors drawn by the place in the row",
        BLOCK + "block_training.py",
        "(draw.seed, draw.step, number)",
        "(draw.seed, draw.step, index)",
        (BLOCK_TRAINING,),
    ),
    Mutation(
        "ids of a block's taps written one too low",
        BLOCK + "block_method.py",
        "list(shape.taps)",
        "[tap - 1 for tap in shape.taps]",
        (BLOCK_FOLDER,),
    ),
)
