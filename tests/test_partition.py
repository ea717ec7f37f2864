import random
import time
from pathlib import Path
from typing import get_args

import pandas as pd
import pytest
import yaml

from fedmem.config.partition import PartitionConfig
from fedmem.corpus.loading import load_corpus
from fedmem.partition import dealing
from fedmem.partition.dealing import check, deal, quotas, split
from fedmem.partition.description import distances, groups, lengths, sizes
from fedmem.partition.partitioners import PARTITIONERS, PartitionError

TASKS = Path(__file__).resolve().parent.parent / "params" / "tasks"


def hub_corpus(file, task):
    """A file in the layout of the task's hub data set, through the code and the columns that the hub's rows take."""
    values = yaml.safe_load((TASKS / f"{task}.yaml").read_text(encoding="utf-8"))
    hub = {"dataset": values["hub_dataset"], "rows": None}
    columns = values["hub_columns"]
    if task == "classification":  # the shared file has abstract ids, as the 20k set and the original files do
        columns = columns | {"id": "abstract_id + sentence_id"}
    return load_corpus("hub", task, path=file, column_map=columns, hub=hub)


def corpus_of(**counts: int) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"id": f"{group}{n}", "instruction": "", "input": f"Text {n} of {group}.", "output": "", "group": group}
            for group, count in counts.items()
            for n in range(count)
        ]
    )


def assign(corpus, partitioner, wanted, seed, **options):
    """`dealing.assign` with these parameters, unchecked."""
    config = PartitionConfig.model_construct(partitioner=partitioner, partition_seed=seed, **options)
    return dealing.assign(corpus, wanted, config)


def dealt(corpus, partitioner="natural", n_clients=2, train=3, test=1, heldout=2, seed=0, skew=0.0, **options):
    wanted = quotas({"train": train, "test": test, "heldout": heldout}, n_clients, skew)
    return split(assign(corpus, partitioner, wanted, seed, **options), wanted)


def test_every_partitioner_is_a_value_of_the_parameter():
    assert get_args(PartitionConfig.model_fields["partitioner"].annotation) == tuple(PARTITIONERS)


@pytest.mark.parametrize("duplicates", ["keep", "drop"])
def test_a_deal_is_its_steps(duplicates):
    corpus, apart = corpus_of(a=20, b=20), corpus_of(c=4).assign(input=list("efgh"))
    corpus.loc[:1, "input"] = "The same text twice."
    config = PartitionConfig(
        n_clients=2, train_rows=0.75, test_rows=0.25, heldout_rows=0, corpus="file", corpus_path="x",
        heldout_path="y", duplicates=duplicates,
    )  # fmt: skip
    rows = deal(config, corpus, apart)
    check(rows)
    assert rows.groupby(["client", "split"]).size().tolist() == [2, 5, 15 if duplicates == "keep" else 14, 2, 5, 15]
    assert rows.equals(deal(config, corpus.iloc[::-1], apart))
    assert set(deal(config, corpus)["split"]) == {"train", "test"}  # without the held-out texts


def test_natural_clients_are_the_largest_groups_in_order():
    rows = dealt(corpus_of(small=6, big=9, tie=7, also=7), n_clients=3)
    assert rows.groupby("client")["group"].unique().map(list).tolist() == [["big"], ["also"], ["tie"]]
    check(rows)


@pytest.mark.parametrize("partitioner", ["iid", "natural", "quantity"])
def test_counts_are_exact_and_no_row_comes_twice(partitioner):
    corpus = corpus_of(a=11, b=12)
    rows = dealt(corpus, partitioner)
    assert rows["row_id"].is_unique
    assert set(rows["row_id"]) <= set(corpus["id"])
    table = sizes(rows)
    assert table["client"].tolist() == [0, 0, 0, 1, 1, 1]
    assert table["split"].tolist() == ["train", "test", "heldout"] * 2
    assert table["rows"].tolist() == [3, 1, 2] * 2
    merged = rows.merge(corpus, left_on="row_id", right_on="id", suffixes=("", "_given"))
    assert (merged["input"] == merged["input_given"]).all()
    assert (merged["group"] == merged["group_given"]).all()


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_same_seed_same_bytes_whatever_the_order_of_rows(partitioner):
    corpus = corpus_of(a=40, b=40)
    rows = dealt(corpus, partitioner, seed=5, dirichlet_alpha=5.0)
    again = corpus.sample(frac=1, random_state=1)
    pd.testing.assert_frame_equal(rows, dealt(again, partitioner, seed=5, dirichlet_alpha=5.0))
    assert rows["row_id"].tolist() != dealt(corpus, partitioner, seed=6, dirichlet_alpha=5.0)["row_id"].tolist()


@pytest.mark.parametrize("partitioner", ["iid", "natural"])
def test_more_training_rows_leave_the_others_where_they_are(partitioner):
    corpus = corpus_of(a=40, b=40)
    few, many = dealt(corpus, partitioner, train=3), dealt(corpus, partitioner, train=20)
    for name in ("test", "heldout"):
        assert few[few["split"] == name]["row_id"].tolist() == many[many["split"] == name]["row_id"].tolist()
    assert set(few["row_id"]) <= set(many["row_id"])


def test_iid_can_use_every_row():
    rows = dealt(corpus_of(a=7, b=5), "iid")  # 12 rows, 2 clients of 3 + 1 + 2
    assert len(rows) == 12


def test_a_client_short_of_rows_is_named():
    with pytest.raises(PartitionError) as caught:
        dealt(corpus_of(a=9, b=5))
    message = str(caught.value)
    assert "client 1 (group 'b') has 5 rows and needs 6 (train 3 + test 1 + heldout 2)" in message
    assert "1 of 2 clients have that many" in message
    assert "'iid'" in message  # 14 rows would do for two clients of 6
    with pytest.raises(PartitionError, match=r"client 1 \(group 'a'\) has 5 rows and needs 6"):
        dealt(corpus_of(a=11), "iid")  # dealt like cards: 6 and 5
    with pytest.raises(PartitionError, match=r"client 0 \(group 'a'\) has 2 rows and needs 6"):
        dealt(corpus_of(a=100), "iid", n_clients=50)


def test_requests_that_cannot_be_met():
    with pytest.raises(PartitionError, match="2 groups for 3 clients; lower n_clients to at most 2"):
        dealt(corpus_of(a=9, b=9), n_clients=3)
    with pytest.raises(PartitionError, match="1 of 10 rows have none"):
        dealt(corpus_of(a=9).pipe(lambda c: pd.concat([c, c.head(1).assign(id="z", group="")])))
    with pytest.raises(PartitionError, match="expected one of iid, natural, dirichlet, topic, quantity"):
        dealt(corpus_of(a=9), "alphabetical")
    with pytest.raises(PartitionError, match="at least one training row"):
        dealt(corpus_of(a=9, b=9), train=0)
    for partitioner in PARTITIONERS:
        with pytest.raises(PartitionError, match=r"has only 0 rows: lower n_clients"):
            dealt(corpus_of(a=9).head(0), partitioner)
        with pytest.raises(PartitionError, match=r"10 clients, but the corpus has only 9 rows: lower n_clients"):
            dealt(corpus_of(a=9), partitioner, n_clients=10)


def test_sizes_and_groups_by_hand():
    rows = pd.DataFrame(
        {
            "row_id": list("abcd"),
            "client": [0, 0, 0, 1],
            "split": ["train", "train", "heldout", "train"],
            "group": ["x", "y", "y", "x"],
            "instruction": "",
            "input": ["1", "123", "12", "1234"],
            "output": "",
        }
    )
    # client 0, train: inputs of 1 and 3 characters, median 2
    assert sizes(rows).to_dict("list") == {
        "client": [0, 0, 1], "split": ["train", "heldout", "train"], "rows": [2, 1, 1], "median_chars": [2.0, 2.0, 4.0],
    }  # fmt: skip
    assert groups(rows)["share"].tolist() == [1 / 3, 2 / 3, 1.0]
    check(rows)


def test_check_finds_what_is_wrong():
    rows = dealt(corpus_of(a=9, b=9))
    again = rows[(rows["client"] == 0) & (rows["split"] == "train")].head(1).assign(client=1, split="heldout")
    with pytest.raises(PartitionError, match=r"given more than once: client 0, train; client 1, heldout"):
        check(pd.concat([rows, again]))
    with pytest.raises(PartitionError, match="client 1 has no training rows"):
        check(rows[(rows["client"] == 0) | (rows["split"] != "train")])
    with pytest.raises(PartitionError, match="client 0 has no training rows"):
        check(rows[rows["client"] == 1])
    with pytest.raises(PartitionError, match="client 0 has no training rows"):
        check(rows.head(0))
    with pytest.raises(PartitionError, match="split: got 'held-out'; expected one of"):
        check(rows.replace({"split": {"heldout": "held-out"}}))
    with pytest.raises(PartitionError, match="lack the column 'output'"):
        check(rows.drop(columns="output"))
    with pytest.raises(PartitionError, match="input is empty"):
        check(rows.assign(input=" "))


SHARES = {"train": 0.6, "test": 0.1, "heldout": 0.3}


def real_corpus(shared, name):
    """A file of the shared data (loaded as such), or of its hub layout, by the mapping of params/tasks."""
    if not name.startswith("hub_"):
        return load_corpus("file", name, path=shared / "data" / f"{name}.jsonl")
    task = name.removeprefix("hub_").removesuffix("_rct")
    suffix = "txt" if name.endswith("_rct") else "jsonl"
    return hub_corpus(shared / "data/hub_layout" / f"{name.removeprefix('hub_')}.{suffix}", task)


def unit_of(name):
    """What names an abstract in the ids of a corpus of sentences or sections."""
    if "classification" not in name:
        return None
    return r"^(\d+)-" if name.startswith("hub_") else r"^(pmid-\d+)-"


REAL = ["summarization", "dialog", "qa", "classification"]
REAL += [f"hub_{name}" for name in REAL] + ["hub_classification_rct"]


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("name", REAL)
def test_real_corpora_are_disjoint_complete_and_seeded(shared, name, partitioner):
    corpus, unit = real_corpus(shared, name), unit_of(name)
    if partitioner in ("natural", "dirichlet") and (corpus["group"] == "").all():
        with pytest.raises(PartitionError, match=r"take .*'topic'"):
            dealt(corpus, partitioner, n_clients=3, unit=unit)
        return
    skew = 1.0 if partitioner == "quantity" else 0.0
    wanted = quotas(SHARES, 3, skew)
    dealt_rows = assign(corpus, partitioner, wanted, 7, unit=unit, dirichlet_alpha=0.3)
    rows = split(dealt_rows, wanted)
    check(rows, unit)  # no row twice, no unit in two splits or with two clients
    given = corpus[corpus["group"].isin(dealt_rows["group"])] if partitioner == "natural" else corpus
    assert set(rows["row_id"]) == set(given["id"])
    assert len(rows) == len(given)
    table = sizes(rows)
    assert len(table) == 9  # 3 clients, 3 splits, none empty
    assert (table["rows"] >= 1).all()
    again = split(assign(corpus.iloc[::-1], partitioner, wanted, 7, unit=unit, dirichlet_alpha=0.3), wanted)
    pd.testing.assert_frame_equal(rows, again)
    by_client = rows.groupby("client").size()
    if partitioner in ("iid", "topic") and unit is None:
        assert by_client.max() - by_client.min() <= (1 if partitioner == "iid" else 3)
    if partitioner == "quantity":  # parts 1 : 1/2 : 1/3, that is 6/11, 3/11, 2/11 of the rows, up to a unit
        largest = dealt_rows.groupby("unit").size().max()
        assert abs(by_client - len(corpus) * pd.Series([6, 3, 2]) / 11).max() <= 2 * largest
    least = quotas({"train": 5, "test": 1, "heldout": 2}, 3)
    few = split(assign(corpus, partitioner, least, 7, unit=unit), least)
    assert sizes(few)["rows"].tolist() == [5, 1, 2] * 3


@pytest.mark.parametrize(
    ("name", "train", "first"),
    [("summarization", 60, 185), ("dialog", 40, 260), ("qa", 60, 192), ("classification", 200, 595)],
)
def test_real_corpora_by_counts(shared, name, train, first):
    corpus = real_corpus(shared, name)
    for partitioner in ("iid", "natural", "topic"):
        rows = dealt(corpus, partitioner, n_clients=3, train=train, test=5, heldout=40)
        check(rows)
        assert sizes(rows)["rows"].tolist() == [train, 5, 40] * 3
    with pytest.raises(PartitionError, match=rf"client 0 \(group .*\) has {first} rows and needs {first + 1} "):
        dealt(corpus, n_clients=3, train=first, test=1, heldout=0)


def test_named_groups_and_sets_of_groups():
    corpus = corpus_of(a=9, b=8, c=7, d=6)
    rows = dealt(corpus, client_groups=["c", ["a", "d"]], n_clients=2, train=4)
    assert set(rows.loc[rows["client"] == 0, "group"]) == {"c"}
    assert set(rows.loc[rows["client"] == 1, "group"]) == {"a", "d"}
    with pytest.raises(PartitionError, match=r"group 'cc'; did you mean 'c'\? \(groups: 'a', 'b', 'c', 'd'\)"):
        dealt(corpus, client_groups=["a", "cc"])


def test_units_stay_together_and_counts_stay_exact():
    # 30 units of 3 rows, 2 clients: each gets 15 units, 45 rows
    corpus = corpus_of(a=90).assign(id=lambda c: [f"u{n // 3}-{n % 3}" for n in range(90)])
    rows = dealt(corpus, "iid", train=20, test=4, heldout=10, unit=r"^(u\d+)-")
    check(rows, r"^u\d+")
    assert sizes(rows)["rows"].tolist() == [20, 4, 10] * 2
    # held-out 10 rows: 3 units and one row of a fourth, whose other two rows nobody gets; test 4: one unit and one row
    heldout = rows[(rows["client"] == 0) & (rows["split"] == "heldout")]["row_id"].str.extract(r"^(u\d+)")[0]
    assert sorted(heldout.value_counts()) == [1, 3, 3, 3]
    with pytest.raises(PartitionError, match=r"unit '\^v' does not match the id 'u0-0'"):
        dealt(corpus, "iid", unit="^v")
    torn = dealt(corpus, "iid", train=20, test=4, heldout=10)
    with pytest.raises(PartitionError, match=r"unit 'u\d+' is given more than once: client"):
        check(torn, r"^u\d+")


def test_quantity_gives_unequal_numbers_by_hand():
    # weights 1, 1/2 of 3/2: 2/3 and 1/3 of 2 × 9 training rows
    rows = dealt(corpus_of(a=40), "quantity", train=9, test=2, heldout=3, skew=1.0)
    assert sizes(rows)["rows"].tolist() == [12, 2, 3, 6, 2, 3]
    with pytest.raises(PartitionError, match=r"the poorest has 0: raise train_rows or lower n_clients, quantity_skew"):
        dealt(corpus_of(a=100), "quantity", n_clients=20, train=1, skew=5.0)


def test_dirichlet_follows_alpha():
    corpus = corpus_of(**dict.fromkeys("abcdef", 300))
    shares = {"train": 1.0, "test": 0.0, "heldout": 0.0}
    largest = {}
    for alpha in (0.1, 1000.0):
        wanted = quotas(shares, 3)
        rows = split(assign(corpus, "dirichlet", wanted, 0, dirichlet_alpha=alpha), wanted)
        assert len(rows) == 1800
        # of each group, the part that its first client holds: all of it for small alpha, a third for large
        largest[alpha] = (rows.groupby("group")["client"].value_counts(normalize=True).groupby("group").max()).mean()
    assert largest[0.1] > 0.75
    assert largest[1000.0] < 0.4


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        (SHARES, "need 150 rows together, more than there are, for any alpha"),  # one row in each of 3 splits
        ({"train": 2, "test": 0, "heldout": 0}, "alpha is too small for that minimum"),  # 100 rows are just enough
    ],
)
def test_an_impossible_dirichlet_ends_and_says_what_is_too_much(shares, said):
    corpus = corpus_of(a=50, b=50)  # 100 rows, 2 groups (B23)
    wanted, begun = quotas(shares, 50), time.perf_counter()
    with pytest.raises(PartitionError) as caught:
        assign(corpus, "dirichlet", wanted, 0, dirichlet_alpha=0.01)
    message = str(caught.value)
    assert time.perf_counter() - begun < 20
    assert "dirichlet_alpha 0.01, 50 clients, at least" in message
    assert said in message
    assert "lower n_clients" in message


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_one_client_gets_everything(partitioner):
    corpus = corpus_of(a=20)
    wanted = quotas(SHARES, 1)
    rows = split(assign(corpus, partitioner, wanted, 0), wanted)
    assert sizes(rows)["rows"].tolist() == [12, 2, 6]
    check(rows)


def test_shares_that_would_leave_a_split_empty():
    wanted = quotas(SHARES, 2)
    dealt_rows = assign(corpus_of(a=5), "iid", wanted, 0)
    with pytest.raises(PartitionError, match=r"client 1 .*has 2 rows, too few for shares of train 0\.6 \+ test 0\.1"):
        split(dealt_rows, wanted)
    wanted = quotas({"train": 0.5, "test": 0.0, "heldout": 0.25}, 2)  # a quarter is left over
    assert sizes(split(assign(corpus_of(a=16), "iid", wanted, 0), wanted))["rows"].tolist() == [4, 2, 4, 2]


def test_topics_find_what_texts_are_about():
    about = {"a": "valve aorta pulse heart", "b": "retina lens cornea iris", "c": "tooth gum molar enamel"}
    rng = random.Random(0)
    corpus = corpus_of(a=30, b=30, c=30)
    corpus["input"] = [" ".join(rng.choices(about[group].split(), k=12)) for group in corpus["group"]]
    wanted = quotas({"train": 1.0, "test": 0.0, "heldout": 0.0}, 3)
    dealt_rows = assign(corpus.assign(group=""), "topic", wanted, 0)
    dealt_rows["about"] = dealt_rows["id"].str[0]
    assert dealt_rows.groupby("client")["about"].nunique().tolist() == [1, 1, 1]
    assert dealt_rows.groupby("client").size().tolist() == [30, 30, 30]
    with pytest.raises(PartitionError, match="no words"):
        assign(corpus.assign(input=". !"), "topic", wanted, 0)


def test_distances_of_words_by_hand():
    rows = pd.DataFrame({"client": [0, 1, 2], "input": ["aa bb", "bb aa aa bb", "cc dd"]})
    table = distances(rows).pivot(index="client", columns="other", values="distance")
    assert table.loc[0, 1] == pytest.approx(0)  # the same words, each half of them
    assert table.loc[0, 2] == pytest.approx(1)  # no word in common
    half = pd.DataFrame({"client": [0, 1], "input": ["aa", "aa bb"]})
    # P = (1, 0), Q = (1/2, 1/2), M = (3/4, 1/4): JSD = ½·log2(4/3) + ½·(½·log2(2/3) + ½·log2 2) = 0.311; √ = 0.558
    assert distances(half)["distance"].iloc[1] == pytest.approx(0.558, abs=1e-3)


def test_lengths_by_hand():
    rows = pd.DataFrame({"client": [0, 0, 0], "input": ["a", "aaa", "aaaaa"]})
    assert lengths(rows).iloc[0].tolist() == [0, 1, 2, 3, 4, 5]
