"""What leaked, side by side, for people to look at; and the rule by which private text is shown at all.

Executed notebooks are shared. So text is shown only when it is synthetic or FEDMEM_SHOW_TEXT=1 is set; otherwise it is
masked by a fixed row of blocks that keeps nothing of it, not even its length. Everything is escaped; no scripts.
"""

import html
import os
from collections.abc import Iterable

import pandas as pd

BLOCKS = "█" * 12
TEXT_COLUMNS = ("instruction", "input", "output", "prefix", "suffix", "continuation")


def may_show(corpus: str) -> bool:
    """Whether the texts of a corpus (`synthetic` or another source) may be shown in a notebook."""
    return corpus == "synthetic" or os.environ.get("FEDMEM_SHOW_TEXT") == "1"


def examples(frame: pd.DataFrame, show: bool, n: int = 3, chars: int = 240) -> pd.DataFrame:
    """The first `n` rows, with texts cut at `chars` characters, or masked unless `show`."""

    def shown(text):
        if not isinstance(text, str) or not text:
            return text
        return (text if len(text) <= chars else text[:chars] + " …") if show else BLOCKS

    texts = [name for name in TEXT_COLUMNS if name in frame]
    return frame.head(n).assign(**{name: frame[name].head(n).map(shown) for name in texts})


class Page:
    """HTML that a notebook displays as it is."""

    def __init__(self, markup: str):
        self.markup = markup

    def _repr_html_(self) -> str:
        return self.markup


def side_by_side(matches: pd.DataFrame, prefixes: pd.DataFrame, suffixes: pd.DataFrame, show: bool, n: int = 3) -> Page:
    """The `n` worst matches: continuation and suffix beside each other, what they share marked; masked unless `show`.

    matches, prefixes, suffixes: tables of the generate and detect stages. Worst first: verbatim before the other
    kinds, then by matched characters.
    """
    ranked = matches.assign(soft=matches["kind"] != "verbatim").sort_values(
        ["soft", "matched_chars", "prefix_id", "suffix_id"], ascending=[True, False, True, True]
    )
    continuation = prefixes.set_index("prefix_id")["continuation"]
    suffix = suffixes.set_index("suffix_id")["suffix"]
    if ranked.empty:
        return Page("<p>Nothing matched.</p>")
    return Page(
        "".join(
            _pair(match, continuation[match.prefix_id], suffix[match.suffix_id], show)
            for match in ranked.head(n).itertuples()
        )
    )


def _pair(match, continuation: str, suffix: str, show: bool) -> str:
    spans = [(tuple(suspicious), tuple(source)) for suspicious, source in match.detections]
    head = (
        f"<b>{html.escape(str(match.kind))}</b>, {match.matched_chars} characters · prompted with a text of client "
        f"{match.prefix_client} · the text is client {match.suffix_client}'s"
    )
    left = _marked(continuation, [source for _, source in spans]) if show else BLOCKS
    right = _marked(suffix, [suspicious for suspicious, _ in spans]) if show else BLOCKS
    cell = 'style="width:50%;text-align:left;vertical-align:top;white-space:pre-wrap"'
    return (
        f'<p>{head}</p><table style="width:100%;table-layout:fixed"><thead><tr><th {cell}>the model wrote</th>'
        f"<th {cell}>the training text</th></tr></thead><tbody><tr><td {cell}>{left}</td><td {cell}>{right}</td></tr>"
        "</tbody></table>"
    )


def _marked(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """Escaped text with the union of the spans in <mark>."""
    pieces, end = [], 0
    for begin, stop in sorted(spans):
        begin, stop = max(begin, end), min(stop, len(text))
        if begin < stop:
            pieces += [html.escape(text[end:begin]), f"<mark>{html.escape(text[begin:stop])}</mark>"]
            end = stop
    return "".join([*pieces, html.escape(text[end:])])
