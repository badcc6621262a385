"""The target, and decoding with a drafter as a server does it."""

from mutation import Mutation

SIMULATION_LOOP = "tests/equivalence/test_simulation_equals_loop.py"

MUTATIONS = (
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
        "hidden_BSH\n",
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
        "target's cache not cropped",
        "spectrain/target/kv_cache.py",
        "self._lengths = [length + count for length, count in zip(self._lengths, counts_B, strict=True)]",
        "self._lengths = [length + self._write.slots.shape[1] for length in self._lengths]",
        ("tests/equivalence/test_greedy_loop.py",),
    ),
    Mutation(
        "rows of different lengths written to the wrong slots",
        "spectrain/target/kv_cache.py",
        "rows_R, slots_R = write.places // write.slots.shape[1], write.slots.flatten()[write.places]",
        "rows_R, slots_R = write.places // write.slots.shape[1], write.slots.flatten()[: len(write.places)]",
        ("tests/unit/test_kv_cache.py",),
    ),
    Mutation(
        "no residual after a rejection",
        "spectrain/decoding/verify.py",
        "weights_BV = torch.where(use_residual_B[:, None], residual_BV, q_BV)",
        "weights_BV = q_BV",
        ("tests/unit/test_verify.py",),
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
        "spectrain/decoding/scheduler.py",
        "survival_Bn = survival(confidence_Bn)\n        # Survival never",
        "survival_Bn = confidence_Bn\n        # Survival never",
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
        "spectrain/decoding/confidence.py",
        "anchors_R = np.array([round_.anchor - span.start for round_ in simulate(span, n, rng)], dtype=np.int64)",
        "anchors_R = np.arange(len(span.accept) - 1)",
        ("tests/unit/test_confidence_samples.py",),
    ),
    Mutation(
        "last hidden state shown before the final norm",
        "spectrain/decoding/proposers.py",
        "hidden = read_hidden(proposer, target, output.last_hidden_BSH)",
        "hidden = output.last_hidden_BSH",
        ("tests/equivalence/test_greedy_loop.py",),
    ),
    Mutation(
        "rounds that the length limit cut are counted",
        "spectrain/decoding/acceptance.py",
        "complete = [[r for r in rounds if not r.cut] for rounds in rounds_per_prompt]",
        "complete = [list(rounds) for rounds in rounds_per_prompt]",
        ("tests/unit/test_acceptance.py",),
    ),
    Mutation(
        "random numbers of a row depend on its neighbours' drafts",
        "spectrain/decoding/loop.py",
        "most = self.settings.num_speculative_tokens + 1",
        "most = draft_ids.shape[1] + 1",
        ("tests/equivalence/test_sampled_loop.py",),
    ),
    Mutation(
        "one random stream for all prompts",
        "spectrain/decoding/loop.py",
        "index if prompt.stream is None else prompt.stream",
        "0 if prompt.stream is None else prompt.stream",
        ("tests/equivalence/test_sampled_loop.py",),
    ),
    Mutation(
        "all drafts verified whatever the policy",
        "spectrain/decoding/loop.py",
        "return proposal if self.settings.policy is None else _shortened(proposal, self.settings.policy)",
        "return proposal",
        ("tests/equivalence/test_draft_policies.py",),
    ),
    Mutation(
        "simulation jumps over the accepted tokens only",
        "spectrain/decoding/simulate.py",
        "anchor += accepted + 1",
        "anchor += max(accepted, 1)",
        (SIMULATION_LOOP,),
    ),
)
