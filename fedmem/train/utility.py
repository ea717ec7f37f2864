"""The table of what a model is good for and how well it knows what it saw: its columns, means, one run's figures.

round, client, metric, split, value, n (rows behind the value), tokens (written in answers, or predicted), cut (rows
that were too long and lost their end), left_out (rows that were chosen but have no room for an answer).

metric: rouge_l (summarization, dialog, qa), accuracy and macro_f1 (classification), all in 0 … 1, of test rows;
perplexity, 1 or more, of train, test and heldout rows. What has no rows is NaN, never 0. `fedmem.train.evaluation`
measures;
this module knows no model.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedmem.config.vocabulary import POOLED

UTILITY = ["round", "client", "metric", "split", "value", "n", "tokens", "cut", "left_out"]


def with_weighted_means(measured: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """The measured frame with the clients' mean of every figure, as client POOLED.

    Weights are |D_j|, the clients' training rows in `rows`; of perplexities the logarithms are averaged, so that it is
    exp of a weighted mean of nats. NaN where a client with training rows has no value. Counts are sums.
    """
    sizes = rows[rows["split"] == "train"].groupby("client").size()
    shares, parts = sizes / sizes.sum(), []
    for (server_round, metric, split), part in measured.groupby(["round", "metric", "split"], sort=False):
        values = part.set_index("client")["value"].reindex(shares.index)
        values = np.exp((np.log(values) * shares).sum(skipna=False)) if metric == "perplexity" else values @ shares
        parts.append((server_round, POOLED, metric, split, values, *part[["n", "tokens", "cut", "left_out"]].sum()))
    return pd.concat([measured, pd.DataFrame(parts, columns=UTILITY)], ignore_index=True)


def utility_of_run(stage) -> dict[str, float]:
    """A run's weighted figures by column name, from its train stage or any stage after it.

    utility_rouge_l, or utility_accuracy and utility_macro_f1 (0 … 1); perplexity_train, perplexity_test and
    perplexity_heldout; perplexity_ratio = heldout ÷ train. They are of the run's checkpoint_round, NaN where that is
    neither round 0 nor the last; `…_before` is the same of the model before training. Empty where none was measured.
    """
    train = stage.ancestor("train")
    if "utility.parquet" not in train.manifest["files"]:
        return {}
    table = train.table("utility")
    last = table["round"].max() if stage.name == "train" else stage.ancestor("generate").config.checkpoint_round
    pooled = table[table["client"] == POOLED]
    names = np.where(pooled["metric"] == "perplexity", "perplexity_" + pooled["split"], "utility_" + pooled["metric"])
    by_round = pooled.assign(name=names).pivot(index="name", columns="round", values="value")
    by_round.loc["perplexity_ratio"] = by_round.loc["perplexity_heldout"] / by_round.loc["perplexity_train"]
    by_round = by_round.reindex(columns=[last, 0] if last else [0, 0])
    after, before = by_round.iloc[:, 0], by_round.iloc[:, 1]
    return after.to_dict() | before.add_suffix("_before").to_dict()
