"""Targets as they come: checkpoints that are not whole, quantised ones, rotary embeddings, numbers that overflow."""

from mutation import Mutation

CHECKPOINTS, QUANTISED = "tests/unit/test_checkpoints.py", "tests/unit/test_quantised_targets.py"
PACKED = "tests/unit/test_packed_heads.py"
ROPE, STRANGE = "tests/unit/test_served_rope.py", "tests/pipeline/test_strange_targets.py"

MUTATIONS = (
    Mutation(
        "a missing tensor is filled at random in silence",
        "spectrain/target/checkpoint.py",
        'missing = _of_the_decoder(info["missing_keys"])',
        "missing: list[str] = []",
        (CHECKPOINTS,),
    ),
    Mutation(
        "a tensor without a place is left out in silence",
        "spectrain/target/checkpoint.py",
        'in _of_the_decoder(info["unexpected_keys"])',
        "in ()",
        (CHECKPOINTS,),
    ),
    Mutation(
        "codes are copied into a drafter without their scales",
        "spectrain/target/quantization.py",
        "return None if spread is None else tensor.float() * spread",
        "return tensor.float()",
        (QUANTISED,),
    ),
    Mutation(
        "matrices of codes whose scales nobody knows are taken for weights",
        "spectrain/target/quantization.py",
        """if tensor.dtype not in _CODES or scale_name is None or any(""",
        """if scale_name is None:
        return tensor.float()
    if tensor.dtype not in _CODES or any(""",
        (QUANTISED,),
    ),
    Mutation(
        "what compressed-tensors divides the scales of a head by is multiplied",
        "spectrain/target/packed_weights.py",
        "scale_NG / divisor.float()",
        "scale_NG * divisor.float()",
        (PACKED,),
    ),
    Mutation(
        "the outputs in a word of AWQ are taken in order",
        "spectrain/target/packed_weights.py",
        "_unpacked(words, 4, outputs, _AWQ_PLACES)",
        "_unpacked(words, 4, outputs)",
        (PACKED,),
    ),
    Mutation(
        "zero points of a packed head are taken for the middle of the codes",
        "spectrain/target/packed_weights.py",
        "zero_NG = _unpacked(packed_WG.T, fitting[0], outputs).T",
        "pass",
        (PACKED,),
    ),
    Mutation(
        "a head is read though something multiplies its inputs",
        "spectrain/target/packed_weights.py",
        "if not set(parts) <= {codes} | _PARTS[codes] | _ACTIVATIONS:",
        "if codes not in parts:",
        (PACKED,),
    ),
    Mutation(
        "activations of a compressed-tensors target are rounded to 8 bits",
        "spectrain/target/model.py",
        'module.__dict__["quantization_enabled"] = False\n            module.__dict__.pop("forward", None)',
        "pass",
        (QUANTISED,),
    ),
    Mutation(
        "longrope factors go by the longest row of a batch",
        "spectrain/target/model.py",
        "    settle(hf_config, config.max_length)\n",
        "",
        (ROPE,),
    ),
    Mutation(
        "room for drafts makes vLLM turn by the long factors",
        "spectrain/engines/vllm/args.py",
        "if original is not None and max_length <= original:",
        "if original is not None and max_length < 0:",
        (ROPE,),
    ),
    Mutation(
        "serve leaves the length to vLLM",
        "spectrain/stages/serve.py",
        'named = {*config.engine.args, *(() if length is None else ("max_model_len",))}',
        "named = {*config.engine.args}",
        ("tests/unit/test_serve.py",),
    ),
    Mutation(
        "logits that are not finite are drawn from",
        "spectrain/target/model.py",
        'self.require_finite(logits.amax(-1), "logits")',
        "pass",
        (STRANGE,),
    ),
    Mutation(
        "ids beyond the embedding reach the target",
        "spectrain/data/chat.py",
        "if token >= size",
        "if token > 2 * size",
        (STRANGE,),
    ),
    Mutation(
        "the CPU kernel takes over a target that chooses its keys itself",
        "spectrain/target/cpu_kernels.py",
        "not on_cpu_alone(model) or chooses_keys:",
        "not on_cpu_alone(model):",
        ("tests/unit/test_hf_capture.py::test_packed_states_are_those_of_each_document_alone",),
    ),
    Mutation(
        "MiniMax-M3's norm gain without its one",
        "spectrain/target/families.py",
        '"minimax_m3_vl_text": _ONE_PLUS,',
        '"minimax_m3_vl_text": _PLAIN,',
        ("tests/unit/test_target_head.py::test_head_equals_the_model",),
    ),
    Mutation(
        "Gemma-4's shared keys and values are counted twice",
        "spectrain/target/attention_size.py",
        "(1 if shared else 2) * kv_heads",
        "2 * kv_heads",
        ("tests/unit/test_known_targets.py::test_parameters_are_those_of_transformers_model",),
    ),
    Mutation(
        "a smoke run overrules the command line",
        "spectrain/stages/smoke.py",
        "for name, value in _SMALL.items() if name not in given}",
        "for name, value in _SMALL.items()}",
        ("tests/pipeline/test_smoke.py::test_what_the_command_line_sets_stays",),
    ),
    Mutation(
        "a plan for more prompts stores no more",
        "spectrain/stages/plan.py",
        "states_bytes=int(states_bytes(context, conversations) * scale),",
        "states_bytes=int(states_bytes(context, conversations)),",
        ("tests/unit/test_recipes.py::test_plans_for_more_prompts_than_there_are",),
    ),
    Mutation(
        "scales of microscaling are half of what they are",
        "spectrain/target/quantization.py",
        "torch.exp2(exponents.float() - _MX_BIAS)",
        "torch.exp2(exponents.float() - _MX_BIAS - 1)",
        ("tests/unit/test_quantised_targets.py",),
    ),
    Mutation(
        "microscaling of uneven rows goes through",
        "spectrain/target/quantization.py",
        "in names and shape[-1] % block:",
        "in names and shape[-1] % 2:",
        ("tests/unit/test_quantised_targets.py",),
    ),
    Mutation(
        "a module is taken to compute where its weights lie",
        "spectrain/target/device_map.py",
        "    if place is None:\n",
        "    if True:\n",
        ("tests/unit/test_device_map.py",),
    ),
    Mutation(
        "attention on the CPU is left out where a layer lies on the disk",
        "spectrain/target/device_map.py",
        "return all(str(place) in _NOT_DEVICES for",
        "return all(str(place) == 'cpu' for",
        ("tests/unit/test_device_map.py",),
    ),
    Mutation(
        "products of layers that lie elsewhere are computed otherwise",
        "spectrain/target/cpu_kernels.py",
        'if hasattr(module, "_old_forward"):',
        "if False:",
        ("tests/unit/test_device_map.py",),
    ),
    Mutation(
        "a weight that the device map leaves out is no error",
        "spectrain/target/device_map.py",
        "        if not any(weight == name",
        "        if False and not any(weight == name",
        ("tests/unit/test_device_map.py",),
    ),
)
