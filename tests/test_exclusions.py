"""What is no memorization, made on purpose and measured by the real pipeline: copies, boilerplate, babble."""

import json

import numpy as np
import pandas as pd
import pytest

from fedmem import detect
from fedmem.analyze import exclusions, ratios
from fedmem.analyze.counting import Counts, MetricsError
from fedmem.analyze.exclusions import EXCLUSIONS, coherence, left_out, mark
from fedmem.corpus import synthetic

CLIENTS, ROWS = 3, 8


@pytest.fixture(scope="module")
def rows():
    """Synthetic rows of three clients: six to train on, two held out."""
    corpus = synthetic.make_corpus("summarization", CLIENTS, ROWS, seed=3)
    corpus["client"] = corpus.groupby("group", sort=False).ngroup()
    corpus["split"] = np.where(corpus.groupby("client").cumcount() < 6, "train", "heldout")
    return corpus.rename(columns={"id": "row_id"})


def measure(rows, says):
    """Tables of a run in which the continuation of a training row is says(row, its suffix); prefixes of five words."""
    cut = rows["input"].str.split(n=5).str[5]
    suffixes = pd.DataFrame(
        {"suffix_id": "s-" + rows["row_id"], "client": rows["client"], "row_id": rows["row_id"],
         "member": rows["split"] == "train", "suffix": cut}
    )  # fmt: skip
    train = rows["split"] == "train"
    prefixes = pd.DataFrame(
        {"prefix_id": "p-" + rows["row_id"], "client": rows["client"], "row_id": rows["row_id"],
         "continuation": [says(row, text) for row, text in zip(rows.to_dict("records"), cut, strict=True)]}
    )[train].reset_index(drop=True)  # fmt: skip
    candidates = detect.find_candidates(prefixes, suffixes)
    matches = detect.find_matches(candidates, prefixes, suffixes, progress=False)
    babble = coherence(prefixes)
    marked = mark(
        matches, prefixes, suffixes, rows, babble.loc[babble["incoherent"], "prefix_id"], boilerplate_share=0.2
    )
    clients = rows[train].groupby("client").size().rename("n_train").reset_index()
    return marked, Counts(marked, prefixes, clients, suffixes)


def values(tables, counting="paper"):
    """{exclusion: {metric: value}}"""
    marked, counts = tables
    table = exclusions.summaries(counts, marked).query("counting == @counting")
    return {name: part.set_index("metric")["value"] for name, part in table.groupby("excluded")}


def unlike(row, suffix):
    """A text that nobody holds."""
    return "Nobody wrote that the ferry left before noon, and nothing else happened on the quay that morning."


def test_nothing_is_excluded_of_plain_leaks(rows):
    # everybody's first row comes back whole: one of six prefixes of each client
    leak = set(rows.drop_duplicates("client")["row_id"])
    shares = values(measure(rows, lambda row, suffix: suffix if row["row_id"] in leak else unlike(row, suffix)))
    for excluded in ("nothing", "shared", "incoherent", "shared, incoherent"):
        assert shares[excluded]["mr_intra"] == pytest.approx(1 / 6), excluded
        assert shares[excluded]["mr_inter"] == 0
    assert shares["own suffix"]["mr_intra"] == 0  # each was the rest of its own prompt


def test_a_row_copied_to_two_clients_is_no_leak_between_them(rows):
    first, second = rows.query("client == 0").iloc[0], rows.query("client == 1").index[0]
    copied = rows.copy()
    copied.loc[second, "input"] = first["input"]

    def says(row, suffix):
        return suffix if row["row_id"] == first["row_id"] else unlike(row, suffix)

    shares = values(measure(copied, says))
    # one of six prefixes of client 0 hits client 1 (of two others): 1/3 · 1/6 · 1/2
    assert shares["nothing"]["mr_inter"] == pytest.approx(1 / 36)
    assert shares["shared"]["mr_inter"] == shares["shared, incoherent"]["mr_inter"] == 0
    assert shares["incoherent"]["mr_inter"] == shares["nothing"]["mr_inter"]
    assert values(measure(rows, says))["nothing"]["mr_inter"] == 0  # without the copy there was nothing


def test_a_boilerplate_sentence_in_every_row_is_nobodys_text(rows):
    greeting = " Thank you very much for asking our board of doctors about your health today."
    same = rows.assign(input=rows["input"] + greeting)
    shares = values(measure(same, lambda row, suffix: unlike(row, suffix) + greeting))
    # every prefix hits every client, and every control too
    assert shares["nothing"]["mr_inter"] == shares["nothing"]["mr_intra"] == 1
    assert shares["nothing"]["excess_total"] == 0
    for metric in ("mr_intra", "mr_inter", "mr_total", "control_total"):
        assert shares["shared"][metric] == 0
        assert shares["incoherent"][metric] == 1
    # beside boilerplate, a leak of the row's own words still counts
    leaks = values(measure(same, lambda row, suffix: suffix))
    assert leaks["shared"]["mr_intra"] == 1
    assert leaks["shared"]["mr_inter"] < leaks["nothing"]["mr_inter"] == 1


def test_boilerplate_of_one_client_alone_is_found_by_its_share(rows):
    greeting = " Thank you very much for asking our board of doctors about your health today."
    same = rows.assign(input=rows["input"].where(rows["client"] != 0, rows["input"] + greeting))
    shares = values(measure(same, lambda row, suffix: unlike(row, suffix) + greeting))
    assert shares["nothing"]["mr_intra"] == pytest.approx(1 / 3)
    assert shares["shared"]["mr_intra"] == 0


def test_babble_is_incoherent(rows):
    lobes = rows.copy()
    here = lobes.index[0]
    words = "The lungs show that both lower lobes of the lungs are clear."
    lobes.loc[here, "input"] = "On the film of that day: " + words + " " + lobes.loc[here, "input"]
    shares = values(measure(lobes, lambda row, suffix: " ".join([words] * 12)))
    assert shares["nothing"]["mr_total"] == 1
    assert shares["incoherent"]["mr_total"] == shares["shared, incoherent"]["mr_total"] == 0
    assert shares["shared"]["mr_total"] == 1


def test_coherence_by_hand():
    texts = ["lobes, " * 40, "A B c d e f g h i j k l", "one two three " * 5, "", "lobes " * 11]
    table = coherence(pd.DataFrame({"prefix_id": range(5), "client": 0, "continuation": texts}))
    assert table["incoherent"].tolist() == [True, False, True, False, False]
    assert table["distinct"].tolist()[:3] == pytest.approx([1 / 38, 1, 3 / 13])  # 15 words have 13 3-grams
    assert table["distinct"].isna().tolist()[3:] == [True, True]  # too short to judge
    assert not coherence(table.assign(continuation=texts), 0, 0)["incoherent"].any()


def test_no_real_text_is_babble(shared):
    for file in sorted((shared / "data").glob("[cdqs]*.jsonl")):
        texts = [json.loads(line)["input"] for line in file.open(encoding="utf-8")]
        table = coherence(pd.DataFrame({"prefix_id": range(len(texts)), "client": 0, "continuation": texts}))
        assert not table["incoherent"].any(), file.name


def test_a_control_that_was_trained_on_is_shared(rows):
    trained = rows.query("client == 0 and split == 'train'").iloc[0]
    same = rows.copy()
    same.loc[rows.query("client == 0 and split == 'heldout'").index[0], "input"] = trained["input"]
    tables = measure(same, lambda row, suffix: suffix if row["row_id"] == trained["row_id"] else unlike(row, suffix))
    shares = values(tables, "verbatim")
    assert shares["nothing"]["control_intra"] == pytest.approx(1 / 18)
    assert shares["shared"]["control_intra"] == 0
    assert shares["shared"]["mr_intra"] == pytest.approx(1 / 18)  # the row is one client's alone


def test_several_valid_suffixes_and_other_spaces_count_once_a_client(rows):  # B67
    first, second = rows.query("client == 0").index[0], rows.query("client == 1").index[0]
    same, start = rows.copy(), "On the third day of the trial, the matron wrote that"
    same.loc[[first, second], "input"] = [f"{start} {same.loc[place, 'input']}" for place in (first, second)]
    said = same.loc[first, "input"].split(maxsplit=5)[5].replace(" ", "  \n ")
    own = same.loc[second, "row_id"]  # client 1's prompt, and client 0's text comes back, with other spaces
    tables = measure(same, lambda row, suffix: said if row["row_id"] == own else unlike(row, suffix))
    table = ratios.cells(tables[1]).query("member and counting == 'verbatim'")
    hits = table.set_index(["prefix_client", "suffix_client"])["hits"]
    assert hits[1, 0] == 1
    assert hits.sum() <= 1 + hits[1, 1]
    kinds = ratios.kinds(tables[1]).query("metric == 'mr_total'")
    assert (kinds["value"] * kinds["n"]).sum() == pytest.approx(1)  # one continuation, one kind


def test_clear_errors(rows):
    marked = pd.DataFrame({"own": [True]})
    with pytest.raises(MetricsError, match="excluded: got 'mine'; expected one of 'nothing', 'own suffix'"):
        left_out(marked, "mine")
    with pytest.raises(MetricsError, match="column shared is missing"):
        left_out(marked, "shared")
    assert [left_out(marked, name).tolist() for name in ("nothing", "own suffix")] == [[False], [True]]
    assert next(iter(EXCLUSIONS)) == "nothing"
