"""The configuration: types, bounds, sections, and which of several values counts."""

from mutation import Mutation

CONFIG = "spectrain/config/"
TYPES = "tests/unit/test_config.py"
LOADING = "tests/unit/test_loading.py"
SECTIONS = "tests/unit/test_block_method.py"

MASKING = "tests/unit/test_masking.py"

MUTATIONS = (
    Mutation(
        "values of engine.environment are shown",
        "spectrain/masking.py",
        "    if path[:2] in _ENVIRONMENTS:\n        return True\n",
        "",
        (MASKING,),
    ),
    Mutation(
        "a secret is compared as it is, and so written into the manifest",
        "spectrain/files.py",
        "return _plain(value, lambda text: text.compared)",
        "return _plain(value, str)",
        (MASKING,),
    ),
    Mutation(
        "the file with the secrets can be read by everybody",
        "spectrain/files.py",
        "partial.touch(0o600 if private else 0o666)",
        "partial.touch(0o666)",
        ("tests/pipeline/test_secrets.py::test_a_run_keeps_its_secrets_and_goes_on_with_them",),
    ),
    Mutation(
        "true is a whole number",
        CONFIG + "overrides.py",
        "if type(value) is not kind and not",
        "if not isinstance(value, kind) and not",
        (TYPES,),
    ),
    Mutation(
        "true is a number",
        CONFIG + "overrides.py",
        "if kind is float and type(value) in (int, float):",
        "if kind is float and isinstance(value, int | float):",
        (TYPES,),
    ),
    Mutation(
        "NaN is a number",
        CONFIG + "overrides.py",
        "if not math.isfinite(value):",
        "if math.isinf(value):",
        (TYPES,),
    ),
    Mutation(
        "null where nothing else may be",
        CONFIG + "overrides.py",
        "(nullable and value is None)",
        "value is None",
        (TYPES,),
    ),
    Mutation(
        "an unknown key is ignored",
        CONFIG + "overrides.py",
        '            raise unknown_key(f"{prefix}{name}")\n',
        "            continue\n",
        (TYPES,),
    ),
    Mutation(
        "an upper bound that may be reached",
        CONFIG + "keys.py",
        '"below": ("less than", operator.lt)',
        '"below": ("less than", operator.le)',
        (TYPES,),
    ),
    Mutation(
        "a lower bound that may be reached",
        CONFIG + "keys.py",
        '"above": ("more than", operator.gt)',
        '"above": ("more than", operator.ge)',
        (TYPES,),
    ),
    Mutation(
        "only the first entry of a list is within its bounds",
        CONFIG + "keys.py",
        "entries = value if isinstance(value, tuple) else (value,)",
        "entries = value[:1] if isinstance(value, tuple) else (value,)",
        (TYPES,),
    ),
    Mutation(
        "taps in the order in which they were given",
        CONFIG + "drafter_schema.py",
        'object.__setattr__(self, "taps", tuple(sorted(self.taps)))',
        'object.__setattr__(self, "taps", tuple(self.taps))',
        (TYPES,),
    ),
    Mutation(
        "no loss at all is a loss",
        CONFIG + "drafter_schema.py",
        "require(sum(self.weights.values()) > 0,",
        "require(sum(self.weights.values()) >= 0,",
        (TYPES,),
    ),
    Mutation(
        "a key that has no effect goes unsaid",
        CONFIG + "drafter_schema.py",
        "if getattr(section, switch) == value:",
        "if getattr(section, switch) is not value and getattr(section, switch) == value:",
        (SECTIONS,),
    ),
    Mutation(
        "a key of another kind's section is accepted",
        "spectrain/stages/drafter_checks.py",
        'if parent == "drafter" and section in others:',
        'if parent == "drafter" and key in others:',
        (SECTIONS,),
    ),
    Mutation(
        "files beat the command line's choice of a group",
        CONFIG + "loading.py",
        "for section, value in values.items() if section not in chosen & set(GROUPS)}",
        "for section, value in values.items()}",
        (LOADING,),
    ),
    Mutation(
        "defaults beat the files",
        CONFIG + "loading.py",
        '{"defaults": ["_self_", *({group: option} for group, option in groups.items()), *hydra_defaults], **node}',
        '{"defaults": [*({group: option} for group, option in groups.items()), "_self_", *hydra_defaults], **node}',
        (LOADING,),
    ),
    Mutation(
        "a run directory's own configuration is reused for another recipe",
        CONFIG + "loading.py",
        'if any(override.key_or_group in ("recipe", "target", "target.path") for override in parsed):',
        'if any(override.key_or_group in ("target", "target.path") for override in parsed):',
        (LOADING,),
    ),
    Mutation(
        "all jobs of a sweep write into one run directory",
        CONFIG + "loading.py",
        '    values["run"]["dir"] = str(Path(values["run"]["dir"]) / str(HydraConfig.get().sweep.subdir))\n',
        "",
        (LOADING,),
    ),
    Mutation(
        "several values without -m are one",
        CONFIG + "loading.py",
        "    if swept:\n        raise ConfigError(",
        "    if len(swept) > 1:\n        raise ConfigError(",
        (LOADING,),
    ),
)
