"""Simulated rounds by place and context: the parts are counted by hand and add up."""

from __future__ import annotations

from spectrain.decoding.acceptance import Round
from spectrain.evaluation.simulation_tables import SimulatedText, tables


def test_rounds_belong_to_the_place_and_the_context_of_their_anchor():
    one = SimulatedText(
        "a",
        "maths",
        "fr",
        "heldout",
        (120,),
        [Round(120, 3, 3), Round(124, 3, 1), Round(136, 3, 0), Round(150, 3, 2, cut=True)],
    )
    two = SimulatedText("b", None, None, "heldout", (10, 300), [Round(10, 3, 1), Round(300, 3, 2), Round(317, 3, 3)])
    found = tables([one, two], 3)

    def lines(name):
        return {line.name: (line.texts, line.rounds, line.acceptance_length) for line in found[name]}

    assert lines("split") == {"heldout": (2, 6, 1 + 10 / 6)}
    assert lines("domain") == {"maths": (1, 3, 1 + 4 / 3), "none": (1, 3, 3.0)}
    assert lines("language") == {"fr": (1, 3, 1 + 4 / 3), "none": (1, 3, 3.0)}
    assert "language" not in tables([two], 3)  # nobody says one
    # Tokens since the beginning of the turn's answer: 0, 4, 16 and 0, 0, 17.
    assert lines("place in the answer") == {"0–15": (2, 4, 1 + 7 / 4), "16–31": (2, 2, 2.5)}
    assert lines("context") == {"0–127": (2, 3, 1 + 5 / 3), "128–255": (1, 1, 1.0), "256–511": (1, 2, 3.5)}
    (line,) = [line for line in found["context"] if line.name == "256–511"]
    assert line.acceptance_per_position == (1.0, 1.0, 0.5)
