"""What is measured, and what is made of it."""

from mutation import Mutation

MUTATIONS = (
    Mutation(
        "last hidden state replayed before the final norm",
        "spectrain/evaluation/replay.py",
        "return self.target.post_norm(self._output[0])",
        "return self._output[0]",
        ("tests/unit/test_parity.py",),
    ),
    Mutation(
        "near-ties of the target looked up one position late",
        "spectrain/evaluation/replay.py",
        "self._output[0][0, position]",
        "self._output[0][0, position + 1]",
        ("tests/unit/test_parity.py",),
    ),
    Mutation(
        "speed-up against another prompt's baseline",
        "spectrain/evaluation/records.py",
        "return [by_key[result.key] for result in results]",
        "return list(baseline)",
        ("tests/unit/test_records.py",),
    ),
    Mutation(
        "records of two draft policies under one name",
        "spectrain/evaluation/records.py",
        'if draft_policy != "fixed":',
        "if draft_threshold is not None:",
        ("tests/unit/test_records.py",),
    ),
    Mutation(
        "recommendation from rounds that a policy cut short",
        "spectrain/evaluation/recommend.py",
        ' and record.draft_policy == "fixed"',
        "",
        ("tests/unit/test_recommend.py",),
    ),
)
