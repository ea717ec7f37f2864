"""The page of leaks: worst first, filtered without scripts, escaped, masked."""

import re
from html.parser import HTMLParser

import pandas as pd
import pytest

from fedmem.analyze import leaks_page

EVIL = '<script>alert("x")</script> & <b>bold</b> text of a patient'


@pytest.fixture
def tables():
    prefixes = pd.DataFrame(
        {"prefix_id": ["p0", "p1"], "client": [0, 1], "continuation": ["He said " + EVIL, "y" * 90]}
    )
    suffixes = pd.DataFrame({"suffix_id": ["s0", "s1"], "client": [0, 1], "suffix": [EVIL, "y" * 70]})
    found = [
        ("p0", 0, "s1", 1, "idea", [[0, 70, 0, 60]], 60),
        ("p1", 1, "s1", 1, "verbatim", [[0, 60, 5, 65]], 60),
        ("p0", 0, "s0", 0, "verbatim", [[0, len(EVIL), 8, 8 + len(EVIL)]], 61),
        ("p1", 1, "s0", 0, None, [[0, 5, 0, 5]], 5),
    ]
    columns = ["prefix_id", "prefix_client", "suffix_id", "suffix_client", "kind", "detections", "matched_chars"]
    return pd.DataFrame(found, columns=columns), prefixes, suffixes


class Parsed(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.ids, self.labels, self.articles, self.text = [], [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.labels += [attributes["for"]] if "for" in attributes else []
        self.articles += [attributes["class"]] if tag == "article" else []

    def handle_data(self, data):
        self.text.append(data)


def test_worst_comes_first(tables):
    page = Parsed(leaks_page.page(*tables, show=True))
    captions = re.findall(r"(verbatim|idea|no record), (\d+) characters", " ".join(page.text))
    assert captions == [("verbatim", "61"), ("verbatim", "60"), ("idea", "60"), ("no record", "5")]
    assert leaks_page.page(*tables, show=True, n=1).count("<article") == 1


def test_filters_are_buttons_that_the_style_sheet_reads(tables):
    text = leaks_page.page(*tables, show=True)
    page = Parsed(text)
    assert page.tags.count("script") == 0
    assert not re.search(r"""\s(?:src|href|on\w+)\s*=""", text)
    assert set(page.labels) == set(page.ids)  # a label for each radio button
    assert text.count(" checked") == 2  # all pairs, all kinds
    classes = {name for names in page.articles for name in names.split()}
    assert classes <= set(page.ids)
    for name in classes:  # the rule that hides what a button does not ask for, after the buttons, before nobody
        assert f"#{name}:checked ~ main article:not(.{name}) {{ display: none; }}" in text
    assert page.articles[0].split()[0] != page.articles[1].split()[0]  # 0→0 and 1→1


def test_text_is_escaped_or_masked(tables):
    shown = leaks_page.page(*tables, show=True, title="<i>Leaks</i>")
    assert EVIL not in shown
    assert "&lt;script&gt;" in shown
    assert "<i>" not in shown
    hidden = leaks_page.page(*tables, show=False)
    for word in ("patient", "bold", "alert", "said", "yyy"):
        assert word not in hidden
    assert "Text is masked" in hidden
    assert "<mark" in hidden  # where they agree still shows


def test_without_matches_the_page_says_so(tables):
    matches, prefixes, suffixes = tables
    assert "Nothing matched." in leaks_page.page(matches.iloc[:0], prefixes, suffixes, show=True)
    assert "Nothing matched." in leaks_page.worst(matches.iloc[:0], prefixes, suffixes, show=True).markup


def test_where_nothing_was_trained_matches_are_called_chance(tables):
    text = leaks_page.page(*tables, show=True, untrained=leaks_page.untrained("none", "synthetic"))
    assert "leaked" not in text
    assert "<h1>What matched, side by side</h1>" in text
    assert "nothing was learnt from these texts, and these matches occur by chance." in text
    assert "unless the model saw the texts before, as an audited model did" in leaks_page.untrained("none", "file")
    trained = leaks_page.page(*tables, show=True, untrained=leaks_page.untrained("fedavg", "synthetic"))
    assert "<h1>What leaked, side by side</h1>" in trained
    assert "chance" not in trained
