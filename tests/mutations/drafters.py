"""What all drafters share: layers, folders, checkpoints of other writers; and the fused losses."""

from mutation import Mutation

LOSSES = "tests/equivalence/test_eagle3_losses.py"
SIMULATION_LOOP = "tests/equivalence/test_simulation_equals_loop.py"

MUTATIONS = (
    Mutation(
        "teacher one position early",
        "spectrain/drafters/drafter.py",
        "last_hidden_UH=batch.last_hidden_TH[teacher_U]",
        "last_hidden_UH=batch.last_hidden_TH[teacher_U - 1]",
        (LOSSES,),
    ),
    Mutation(
        "target ids stored where offsets belong",
        "spectrain/drafters/drafter_folder.py",
        'tensors["d2t"] = drafter.vocab.d2t()',
        'tensors["d2t"] = drafter.vocab.ids_D.clone()',
        ("tests/unit/test_drafter_folder.py",),
    ),
    Mutation(
        "t2d is not compared with d2t",
        "spectrain/drafters/drafter_folder.py",
        "    if len(different):\n",
        "    if False:\n",
        ("tests/unit/test_drafter_folder.py",),
    ),
    Mutation(
        "a drafter's fingerprint of its target is not looked at",
        "spectrain/drafters/serving_config.py",
        "            return target.has_revision(self.target_fingerprint)\n",
        "            return True\n",
        ("tests/unit/test_serving_config.py::test_whether_a_drafter_was_trained_for_a_target",),
    ),
    Mutation(
        "rotary frequencies rounded with the weights",
        "spectrain/drafters/layers.py",
        "phase = positions.float()[..., None] * self.inv_freq",
        "phase = positions.float()[..., None] * self.inv_freq.bfloat16().float()",
        ("tests/unit/test_drafter_folder.py",),
    ),
    Mutation(
        "simulation against the target's whole distribution, not the truncated one",
        "spectrain/drafters/teacher_forced.py",
        "log_q_CV = truncated_log_probs(teacher.head.hidden_to_logits(teacher.last_hidden_UH[part]), sampling)",
        "log_q_CV = teacher.head.hidden_to_logits(teacher.last_hidden_UH[part]).log_softmax(-1)",
        (SIMULATION_LOOP,),
    ),
    Mutation(
        "z-lab's layer ids read as ours",
        "spectrain/drafters/foreign_checkpoints.py",
        """return taps(section["target_layer_ids"], 1, field, where)""",
        """return taps(section["target_layer_ids"], 0, field, where)""",
        ("tests/unit/test_foreign_checkpoints.py",),
    ),
    Mutation(
        "a speculators folder that is silent about norm_before_residual",
        "spectrain/drafters/autoregressive/eagle3.py",
        """vllm_defaults = {"norm_before_residual": True,""",
        """vllm_defaults = {"norm_before_residual": False,""",
        ("tests/unit/test_foreign_checkpoints.py",),
    ),
    Mutation(
        "an embedding of another target is taken for the target's",
        "spectrain/drafters/drafter.py",
        "return difference <= _ROUNDING**2 * total",
        "return True",
        ("tests/unit/test_foreign_checkpoints.py",),
    ),
    Mutation(
        "draft vocabulary's teacher renormalised",
        "spectrain/drafters/losses/students.py",
        "log_normalizer_C = self.log_normalizer_U[part]",
        "log_normalizer_C = logits_CD.logsumexp(-1)",
        ("tests/unit/test_losses.py",),
    ),
    Mutation(
        "Triton's sum of exponentials is not rescaled when a larger logit is met",
        "spectrain/drafters/losses/triton_terms.py",
        "total_B * tl.exp(top_B - larger_B)",
        "total_B",
        ("tests/unit/test_triton_loss.py",),
    ),
    Mutation(
        "Triton's gradient of tv without the mass below the target's",
        "spectrain/drafters/losses/triton_terms.py",
        "a += slope * tl.sum(below_B, 0)",
        "a += slope * 0.0",
        ("tests/unit/test_triton_loss.py",),
    ),
    Mutation(
        "of several processes each caps the text by itself",
        "spectrain/drafters/shared_solving.py",
        "return sum(counts[: self.peers.index]), sum(counts)",
        "return 0, sum(counts)",
        ("tests/unit/test_shared_solving.py",),
    ),
    Mutation(
        "what other processes add to a sum is left out",
        "spectrain/drafters/init_from_target.py",
        "self._text.total(self.xx), self._text.total(self.xy)",
        "self._text.total(self.xx), self.xy",
        ("tests/unit/test_shared_solving.py",),
    ),
)
