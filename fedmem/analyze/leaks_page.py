"""What leaked, side by side, for people to look at: a static page without scripts, and the worst matches of a run."""

from collections.abc import Iterator
from html import escape
from typing import Any

import pandas as pd

from fedmem.config.vocabulary import KINDS
from fedmem.display import html_page
from fedmem.display.private_text import Page, side_by_side
from fedmem.machine.paths import data_file

STYLE = data_file("leaks.css").read_text("utf-8")


def untrained(algorithm: str, corpus: str) -> str:
    """The warning to print beside the matches of a model that was not trained here; empty for a trained model.

    algorithm: the train stage's parameter, "none" when nothing was trained. corpus: synthetic | file | hub.
    """
    if algorithm != "none":
        return ""
    if corpus == "synthetic":
        return "No model was trained here: nothing was learnt from these texts, and these matches occur by chance."
    return (
        "No model was trained here: these matches occur by chance, unless the model saw the texts before, as an "
        "audited model did."
    )


def worst(matches: pd.DataFrame, prefixes: pd.DataFrame, suffixes: pd.DataFrame, show: bool, n: int = 3) -> Page:
    """The worst matches: suffix and continuation beside each other, with the shared text marked.

    matches: the detect stage's table of that name. prefixes, suffixes: the generate stage's tables of these names.
    show: True shows the text, False masks it (see `may_show`). n: number of matches, ≥ 0.
    Worst first: verbatim before the other kinds, then by matched characters.
    """
    pairs = [markup for _, markup in _shown(matches, prefixes, suffixes, show, n)]
    return Page("".join(pairs) or "<p>Nothing matched.</p>")


def page(
    matches: pd.DataFrame,
    prefixes: pd.DataFrame,
    suffixes: pd.DataFrame,
    show: bool,
    n: int = 200,
    title: str | None = None,
    untrained: str = "",
) -> str:
    """A static HTML page of the worst matches, which the reader can filter by pair of clients and by kind.

    matches, prefixes, suffixes, show, n: as in `worst`.
    title: the page's heading; None: a default.
    untrained: the warning that `untrained` returns; when it is not empty, the page shows it and calls no match a leak.
    Returns HTML without scripts: the filters are radio buttons and style rules. All data is escaped.
    """
    shown = list(_shown(matches, prefixes, suffixes, show, n))
    pairs = sorted({(match.prefix_client, match.suffix_client) for match, _ in shown})
    names = {f"pair-{i}": f"client {j} prompts, client {k}'s text" for i, (j, k) in enumerate(pairs)}
    # Pairs and kinds become numbered classes: a name such as "no record" is not a valid class.
    kinds = list(dict.fromkeys(match.kind for match, _ in shown))
    names |= {f"kind-{i}": kind for i, kind in enumerate(kinds)}
    buttons = "".join(
        f'<p class="of">{words}</p>{_buttons(group, {k: v for k, v in names.items() if k.startswith(group)})}'
        for group, words in (("pair", "whose prompt, whose text"), ("kind", "kind"))
    )
    # An article is hidden while a radio button of another class is checked; "all" has no rule and hides nothing.
    rules = "".join(f"#{name}:checked ~ main article:not(.{name}) {{ display: none; }}" for name in names)
    articles = "".join(
        f'<article class="pair-{pairs.index((match.prefix_client, match.suffix_client))} '
        f'kind-{kinds.index(match.kind)}">{markup}</article>'
        for match, markup in shown
    )
    title = title or f"What {'matched' if untrained else 'leaked'}, side by side"
    chance = f"<p><b>{escape(untrained)}</b></p>" if untrained else ""
    masks = "" if show else "<p>Text is masked; set FEDMEM_SHOW_TEXT=1 and analyze again to see it.</p>"
    about = f"The {len(shown):,} worst of {len(matches):,} matches, verbatim first, then by matched characters."
    body = f"<h1>{escape(title)}</h1>{chance}<p>{about}</p>{masks}{buttons}"
    return html_page.page(title, STYLE + rules, f"{body}<main>{articles or '<p>Nothing matched.</p>'}</main>")


def _shown(
    matches: pd.DataFrame, prefixes: pd.DataFrame, suffixes: pd.DataFrame, show: bool, n: int
) -> Iterator[tuple[Any, str]]:
    """(match, its HTML) for each of the `n` worst matches."""
    order = matches["kind"].map({kind: place for place, kind in enumerate(KINDS)}).fillna(len(KINDS))
    kind = matches["kind"].astype(object).where(matches["kind"].notna(), "no record")  # the match has no assigned kind
    # The ids break ties, so that the page does not depend on the order of the table.
    ranked = matches.assign(order=order, kind=kind).sort_values(
        ["order", "matched_chars", "prefix_id", "suffix_id"], ascending=[True, False, True, True]
    )
    continuation = prefixes.set_index("prefix_id")["continuation"]
    suffix = suffixes.set_index("suffix_id")["suffix"]
    for match in ranked.head(n).itertuples():
        places = [((a, b), (c, d)) for a, b, c, d in match.detections]
        caption = (
            f"{match.kind}, {match.matched_chars} characters: prompted with a text of client {match.prefix_client}, "
            f"and client {match.suffix_client}'s text came back"
        )
        yield match, side_by_side(suffix[match.suffix_id], continuation[match.prefix_id], places, show, caption)


def _buttons(group: str, names: dict[str, str]) -> str:
    """One radio button for all, and one for each of `names` ({class: label})."""
    return "".join(
        f'<input type="radio" name="{group}" id="{name}"{" checked" if name == f"all-{group}" else ""}>'
        f'<label for="{name}">{escape(words)}</label>'
        for name, words in ({f"all-{group}": "all"} | names).items()
    )
