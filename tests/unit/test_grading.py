"""Whether an answer is right: the last number, or what is boxed."""

from __future__ import annotations

import pytest

from spectrain.evaluation.grading import is_right, last_boxed


@pytest.mark.parametrize(
    ("answer", "right", "grading", "expected"),
    [
        ("So she makes 9 * 2 = $18 a day.", "Janet sells 9 eggs.\n#### 18", "number", True),
        ("The answer is 1,800.", "#### 1800", "number", True),
        ("The answer is 18 and not 17", "#### 18", "number", False),
        ("nothing at all", "#### 18", "number", False),
        (r"First \boxed{3}, then \boxed{18}.", "#### 18", "boxed", True),
        (r"It is 18, so \boxed{17}", "#### 18", "boxed", False),
        ("without a box, 18", "#### 18", "boxed", True),
        (r"\boxed{\frac{1}{2}}", r"\dfrac{1}{2}", "boxed", True),
        (r"\boxed{0.5}", r"\frac{1}{2}", "boxed", True),
        (r"\boxed{ \left( 3, \frac{\pi}{2} \right) }", r"(3,\frac{\pi}{2})", "boxed", True),
        (r"\boxed{3, 4}", "34", "boxed", False),
        (r"\boxed{x^2}", "x^3", "boxed", False),
        (r"\boxed{\text{Evelyn}}", "Evelyn", "boxed", True),
        (r"\boxed{-7}", "7", "boxed", False),
        ("no number", "x", "boxed", False),
    ],
)
def test_answers_are_compared_by_what_they_end_with(answer, right, grading, expected):
    assert is_right(answer, right, grading) is expected


def test_a_box_may_hold_braces_and_must_be_closed():
    assert last_boxed(r"a \boxed{\frac{1}{2}} b") == r"\frac{1}{2}"
    assert last_boxed(r"a \boxed{1") is None and last_boxed("none") is None
