"""Targets of a model type that nothing is known of."""

from mutation import Mutation

GENERIC = "tests/unit/test_generic_targets.py"

MUTATIONS = (
    Mutation(
        "what was measured without weights is believed of the loaded model",
        "spectrain/target/model.py",
        "if math.family.found:",
        "if False:",
        (GENERIC,),
    ),
    Mutation(
        "what enters the first layer need not be a multiple of the embedding",
        "spectrain/target/generic_family.py",
        "_difference(scale * asked_1TH, entered[0])",
        "0.0",
        (GENERIC,),
    ),
    Mutation(
        "logits are measured where no cap bends them alone",
        "spectrain/target/generic_family.py",
        "for raw, own in ((small_1TV, small), (large_1TV, large))",
        "for raw, own in ((small_1TV, small),)",
        (GENERIC,),
    ),
    Mutation(
        "the cache of an unknown target is not tried",
        "spectrain/target/generic_check.py",
        "        _compare_cache(target, ids_RS)\n",
        "",
        (GENERIC,),
    ),
    Mutation(
        "a bias of an unknown target's final norm is left out",
        "spectrain/target/generic_family.py",
        'if getattr(norm, "bias", None) is not None:',
        "if False:",
        (GENERIC,),
    ),
)
