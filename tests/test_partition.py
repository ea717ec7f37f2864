import pandas as pd
import pytest

from fedmem.corpora import load_corpus
from fedmem.partition import PartitionError, check, deal, groups, sizes


def corpus_of(**counts: int) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"id": f"{group}{n}", "instruction": "", "input": f"Text {n} of {group}.", "output": "", "group": group}
            for group, count in counts.items()
            for n in range(count)
        ]
    )


def dealt(corpus, partitioner="natural", n_clients=2, train=3, test=1, heldout=2, seed=0):
    return deal(corpus, partitioner, n_clients, train_rows=train, test_rows=test, heldout_rows=heldout, seed=seed)


def test_natural_clients_are_the_largest_groups_in_order():
    rows = dealt(corpus_of(small=6, big=9, tie=7, also=7), n_clients=3)
    assert rows.groupby("client")["group"].unique().map(list).tolist() == [["big"], ["also"], ["tie"]]
    check(rows)


@pytest.mark.parametrize("partitioner", ["iid", "natural"])
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


@pytest.mark.parametrize("partitioner", ["iid", "natural"])
def test_same_seed_same_bytes_whatever_the_order_of_rows(partitioner):
    corpus = corpus_of(a=40, b=40)
    rows = dealt(corpus, partitioner, seed=5)
    pd.testing.assert_frame_equal(rows, dealt(corpus.sample(frac=1, random_state=1), partitioner, seed=5))
    assert rows["row_id"].tolist() != dealt(corpus, partitioner, seed=6)["row_id"].tolist()


@pytest.mark.parametrize("partitioner", ["iid", "natural"])
def test_more_training_rows_leave_the_others_where_they_are(partitioner):
    corpus = corpus_of(a=40, b=40)
    few, many = dealt(corpus, partitioner, train=3), dealt(corpus, partitioner, train=20)
    for split in ("test", "heldout"):
        assert few[few["split"] == split]["row_id"].tolist() == many[many["split"] == split]["row_id"].tolist()
    assert set(few["row_id"]) <= set(many["row_id"])


def test_iid_can_use_every_row():
    rows = dealt(corpus_of(a=7, b=5), "iid")  # 12 rows, 2 clients of 3 + 1 + 2
    assert len(rows) == 12


def test_a_client_short_of_rows_is_named():
    with pytest.raises(PartitionError) as caught:
        dealt(corpus_of(a=9, b=5))
    message = str(caught.value)
    assert "client 1 (group 'b') has 5 rows and needs 6 (train 3 + test 1 + heldout 2)" in message
    assert "serve 1 clients" in message
    assert "'iid'" in message  # 14 rows would do for two clients of 6
    with pytest.raises(PartitionError, match=r"client 1 has 5 rows and needs 6"):
        dealt(corpus_of(a=11), "iid")  # dealt like cards: 6 and 5
    with pytest.raises(PartitionError, match="client 0 has 2 rows and needs 6"):
        dealt(corpus_of(a=100), "iid", n_clients=50)


def test_requests_that_cannot_be_met():
    with pytest.raises(PartitionError, match="2 groups for 3 clients; lower n_clients to at most 2"):
        dealt(corpus_of(a=9, b=9), n_clients=3)
    with pytest.raises(PartitionError, match="1 of 10 rows have none"):
        dealt(corpus_of(a=9).pipe(lambda c: pd.concat([c, c.head(1).assign(id="z", group="")])))
    with pytest.raises(PartitionError, match="allowed are 'iid' and 'natural'"):
        dealt(corpus_of(a=9), "dirichlet")
    with pytest.raises(PartitionError, match="at least one training row"):
        dealt(corpus_of(a=9, b=9), train=0)
    with pytest.raises(PartitionError, match="client 0 has 0 rows"):
        dealt(corpus_of(a=9).head(0), "iid")


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
    with pytest.raises(PartitionError, match="split 'held-out'"):
        check(rows.replace({"split": {"heldout": "held-out"}}))
    with pytest.raises(PartitionError, match="lack the column 'output'"):
        check(rows.drop(columns="output"))
    with pytest.raises(PartitionError, match="input is empty"):
        check(rows.assign(input=" "))


@pytest.mark.parametrize(
    ("name", "train", "first"),
    [("summarization", 60, 185), ("dialog", 40, 260), ("qa", 60, 192), ("classification", 200, 595)],
)
def test_real_corpora(shared, name, train, first):
    corpus = load_corpus("file", name, path=shared / "data" / f"{name}.jsonl")
    for partitioner in ("iid", "natural"):
        rows = dealt(corpus, partitioner, n_clients=3, train=train, test=5, heldout=40)
        check(rows)
        assert sizes(rows)["rows"].tolist() == [train, 5, 40] * 3
        pd.testing.assert_frame_equal(rows, dealt(corpus, partitioner, n_clients=3, train=train, test=5, heldout=40))
    with pytest.raises(PartitionError, match=rf"client 0 \(group .*\) has {first} rows and needs {first + 1} "):
        dealt(corpus, n_clients=3, train=first, test=1, heldout=0)
