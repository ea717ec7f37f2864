"""What leaked, side by side, for people to look at; and the rule by which private text is shown at all.

Executed notebooks are shared. So text is shown only when it is synthetic or FEDMEM_SHOW_TEXT=1 is set; otherwise it is
masked by blocks that keep nothing of it, not even its length. Everything is escaped; no scripts.
"""

import os

import pandas as pd

from fedmem.detect.explain import masked, side_by_side

TEXT_COLUMNS = ("instruction", "input", "output", "prefix", "suffix", "continuation", "words")


def may_show(corpus: str) -> bool:
    """Whether the texts of a corpus (`synthetic` or another source) may be shown in a notebook."""
    return corpus == "synthetic" or os.environ.get("FEDMEM_SHOW_TEXT") == "1"


def examples(frame: pd.DataFrame, show: bool, n: int = 3, chars: int = 240) -> pd.DataFrame:
    """The first `n` rows, with texts cut at `chars` characters, or masked unless `show`."""

    def shown(text):
        if not isinstance(text, str) or not text:
            return text
        return masked(text if len(text) <= chars else text[:chars] + " …", show)

    texts = [name for name in TEXT_COLUMNS if name in frame]
    return frame.head(n).assign(**{name: frame[name].head(n).map(shown) for name in texts})


class Page:
    """HTML that a notebook displays as it is."""

    def __init__(self, markup: str):
        self.markup = markup

    def _repr_html_(self) -> str:
        return self.markup


def worst(matches: pd.DataFrame, prefixes: pd.DataFrame, suffixes: pd.DataFrame, show: bool, n: int = 3) -> Page:
    """The `n` worst matches: suffix and continuation beside each other, what they share marked; masked unless `show`.

    matches, prefixes, suffixes: tables of the generate and detect stages. Worst first: verbatim before the other
    kinds, then by matched characters.
    """
    ranked = matches.assign(soft=matches["kind"] != "verbatim").sort_values(
        ["soft", "matched_chars", "prefix_id", "suffix_id"], ascending=[True, False, True, True]
    )
    continuation = prefixes.set_index("prefix_id")["continuation"]
    suffix = suffixes.set_index("suffix_id")["suffix"]
    pairs = []
    for match in ranked.head(n).itertuples():
        places = [((a, b), (c, d)) for a, b, c, d in match.detections]
        caption = (
            f"{match.kind}, {match.matched_chars} characters: prompted with a text of client {match.prefix_client}, "
            f"and client {match.suffix_client}'s text came back"
        )
        pairs.append(side_by_side(suffix[match.suffix_id], continuation[match.prefix_id], places, show, caption))
    return Page("".join(pairs) or "<p>Nothing matched.</p>")
