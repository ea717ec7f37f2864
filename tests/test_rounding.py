"""Halves go up, on the decimal value, wherever a figure is shown."""

import math

import pandas as pd
import pytest

from fedmem.display.drawing import percent_words
from fedmem.display.numbers import (
    display_settings,
    half_up,
    percent,
    readable,
    signed_points,
    significant_figures,
)


@pytest.mark.parametrize(
    ("value", "digits", "rounded"),
    [
        (43.75, 1, 43.8), (43.74999999999999, 1, 43.8), (43.65, 1, 43.7), (43.749, 1, 43.7), (-43.75, 1, -43.8),
        (0.125, 2, 0.13), (2.5, 0, 3.0), (0.0, 1, 0.0), (99.95, 0, 100.0), (1e20, 1, 1e20), (math.inf, 1, math.inf),
    ],
)  # fmt: skip
def test_halves_go_up(value, digits, rounded):
    assert half_up(value, digits) == rounded


def test_what_is_undefined_stays_so_and_nothing_is_minus_0():
    assert math.isnan(half_up(math.nan, 1))
    assert str(half_up(-0.01, 1)) == "0.0"


@pytest.mark.parametrize("share", [7 / 16, 7 / 16 - 1e-16, 7 / 16 + 1e-16])
def test_a_share_reads_the_same_however_it_was_summed(share):
    assert percent(share) == "43.8 %"
    assert percent(share / 10) == "4.38 %"
    assert percent_words(10 * share) == "4.4"
    assert percent_words(share) == "0.44"
    assert significant_figures(100 * share) == "43.75"


def test_a_half_is_not_rounded_to_the_even_neighbour():
    assert percent_words(12.5) == "13"
    assert percent(0.03125) == "3.13 %"
    assert significant_figures(1.5625) == "1.563"
    assert [significant_figures(value) for value in (12345.6, 9999.6, -20000.4)] == ["12346", "10000", "-20000"]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.25, 1e-7, 1e15, -0.3333333, math.nan, 9.99996])
def test_tables_are_else_as_they_were(value):
    assert significant_figures(value) == f"{value:.4g}"


def test_tables_show_floats_as_words_and_what_is_missing_as_a_dash():
    table = pd.DataFrame({"share": [0.04375, math.nan], "n": [3, 4], "run": ["a", None]})
    assert readable(table).to_dict("list") == {"share": ["0.04375", "–"], "n": [3, 4], "run": ["a", "–"]}
    assert readable(table[["share"]], signed_points)["share"].tolist() == ["+4.38", "–"]
    assert signed_points(-0.01234) == "-1.23"
    assert readable(table.iloc[:0]).empty


def test_tables_of_a_notebook_have_one_look():
    before = pd.options.display.float_format
    with pd.option_context("display.float_format", None, "display.html.border", 1, "display.max_rows", 60):
        display_settings(max_rows=4)
        table = pd.DataFrame({"share": [0.123456] * 5})._repr_html_()
    assert 'border="0"' in table
    assert "<td>0.1235</td>" in table
    assert "<td>...</td>" in table  # five rows are more than four
    assert pd.options.display.float_format is before
