"""What goes into files: values that JSON has."""

import json
import math

from spectrain.files import finite_or_none, plain


def test_plain_values_are_what_json_has():
    written = plain({"a": (1, [math.nan, {"b": math.inf}]), "c": "text", "d": True, "e": None, "f": 0.5})
    assert written == {"a": [1, [None, {"b": None}]], "c": "text", "d": True, "e": None, "f": 0.5}
    assert json.loads(json.dumps(written, allow_nan=False)) == written


def test_a_figure_is_finite_or_none():
    assert (finite_or_none(0.5), finite_or_none(math.nan), finite_or_none(-math.inf)) == (0.5, None, None)
