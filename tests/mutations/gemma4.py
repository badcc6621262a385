"""The assistant of a Gemma-4 target, and the target's keys and values that it reads."""

from mutation import Mutation

STEPS = "tests/equivalence/test_gemma4_mtp.py"
LOOP = "tests/equivalence/test_gemma4_loop.py"
KEYS_VALUES = "tests/unit/test_target_kv.py"
STAGES = "tests/pipeline/test_gemma4_stages.py"
MTP = "spectrain/drafters/autoregressive/gemma4_mtp.py"
ASSISTANT = "spectrain/drafters/autoregressive/gemma4_assistant.py"

MUTATIONS = (
    Mutation(
        "a Gemma-4 assistant asks from a position that advances with its steps",
        MTP,
        "        self._left -= 1\n",
        "        self._left -= 1\n        self._last_B1 = self._last_B1 + 1\n",
        (STEPS,),
    ),
    Mutation(
        "a Gemma-4 assistant asks from the anchor's position, as transformers' generate does",
        MTP,
        "self._last_B1 = cache.columns_B[:, None] - 1",
        "self._last_B1 = cache.columns_B[:, None]",
        (STEPS,),
    ),
    Mutation(
        "a Gemma-4 assistant is trained at the position of the token it takes in",
        MTP,
        "position_1M = batch.position_ids_T[query_M][None]",
        "position_1M = batch.position_ids_T[query_M][None] + 1",
        (STEPS,),
    ),
    Mutation(
        "a Gemma-4 assistant reads the target's embedding without its scale",
        MTP,
        "embedding_B1H = drafter.head.embed(self.token_B[:, None])",
        "embedding_B1H = drafter.head.embed_rows(self.token_B[:, None])",
        (STEPS,),
    ),
    Mutation(
        "a sliding layer of a Gemma-4 assistant sees one key too many",
        MTP,
        "SLIDING: seen & (distance < shape.window)",
        "SLIDING: seen & (distance <= shape.window)",
        (STEPS,),
    ),
    Mutation(
        "a Gemma-4 assistant reads layers that themselves read those of others",
        "spectrain/target/spec.py",
        "own = self.layer_types[: self.num_layers - self.shared_kv_layers]",
        "own = self.layer_types[: self.num_layers]",
        (KEYS_VALUES,),
    ),
    Mutation(
        "keys and values of the pass are taken from the beginning of the cache",
        "spectrain/target/slot_cache.py",
        "return output if output.target_kv is None else _with_new_slots(output, positions_BT)",
        "return output if output.target_kv is None else _with_new_slots(output, positions_BT - start_B1)",
        (KEYS_VALUES,),
    ),
    Mutation(
        "documents of a packed row get one another's keys and values",
        "spectrain/engines/hf.py",
        "own_kv = {layer: (keys_TGd[rows], values_TGd[rows]) for",
        "own_kv = {layer: (keys_TGd[:length], values_TGd[:length]) for",
        (KEYS_VALUES,),
    ),
    Mutation(
        "a Gemma-4 assistant goes on from its own width's state of the step before",
        MTP,
        "normed_1Mh, feature_1MH = self.body.step(embedding_1MH, feature_1MH, position_1M, kv, visible)",
        "normed_1Mh, _ = self.body.step(embedding_1MH, feature_1MH, position_1M, kv, visible)",
        (STEPS,),
    ),
    Mutation(
        "centroids learn from the tokens in their stored order",
        ASSISTANT,
        "probs_BV[:, self.token_ordering].unflatten",
        "probs_BV.unflatten",
        (LOOP,),
    ),
    Mutation(
        "gradient checkpointing of a Gemma-4 assistant keeps everything",
        ASSISTANT,
        "checkpoint(layers, x_BMh, use_reentrant=False) if again else layers(x_BMh)",
        "layers(x_BMh)",
        (STEPS + "::test_layers_run_again_in_the_backward_pass_and_gradients_are_the_same",),
    ),
)
