"""The table of a model's task metrics and perplexities: its columns, the mean over clients, the figures of one run.

Columns: round, client, metric, split, value, n (rows behind the value), tokens (written in answers, or predicted), cut
(rows that were too long and lost their end), left_out (chosen rows without room for an answer).

metric: rouge_l (summarization, dialog, qa), accuracy and macro_f1 (classification), all in 0 … 1, on test rows;
perplexity, 1 or more, on train, test and heldout rows. A value without rows is NaN, never 0. `fedmem.train.evaluation`
measures the values; this module does not load a model.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedmem.config.vocabulary import POOLED

UTILITY = ["round", "client", "metric", "split", "value", "n", "tokens", "cut", "left_out"]


def with_weighted_means(measured: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """The frame `measured` (columns UTILITY) with the weighted mean over clients of every figure, as client POOLED.

    The weights are |D_j|, the numbers of the clients' training rows in `rows` (columns client, split). For perplexity
    the logarithms are averaged, which gives exp of a weighted mean in nats. The mean is NaN when a client with training
    rows has no value. Counts are summed.
    """
    sizes = rows[rows["split"] == "train"].groupby("client").size()
    shares, parts = sizes / sizes.sum(), []
    for (server_round, metric, split), part in measured.groupby(["round", "metric", "split"], sort=False):
        # reindex: a client without a row gives NaN, and so does the mean; skipping it would change the weights
        values = part.set_index("client")["value"].reindex(shares.index)
        values = np.exp((np.log(values) * shares).sum(skipna=False)) if metric == "perplexity" else values @ shares
        parts.append((server_round, POOLED, metric, split, values, *part[["n", "tokens", "cut", "left_out"]].sum()))
    return pd.concat([measured, pd.DataFrame(parts, columns=UTILITY)], ignore_index=True)


def utility_of_run(stage) -> dict[str, float]:
    """The weighted figures of a run by column name.

    stage: the run's train stage or any later one.

    Returns utility_rouge_l, or utility_accuracy and utility_macro_f1 (0 … 1); perplexity_train, perplexity_test and
    perplexity_heldout; perplexity_ratio = heldout ÷ train. The figures belong to the run's checkpoint_round and are NaN
    when it is neither round 0 nor the last one; `…_before` are those of the model before training. Returns an empty
    dict when nothing was measured.
    """
    train = stage.ancestor("train")
    if "utility.parquet" not in train.manifest["files"]:
        return {}
    table = train.table("utility")
    # a train stage has no checkpoint_round, which is a parameter of generate
    last = table["round"].max() if stage.name == "train" else stage.ancestor("generate").config.checkpoint_round
    pooled = table[table["client"] == POOLED]
    names = np.where(pooled["metric"] == "perplexity", "perplexity_" + pooled["split"], "utility_" + pooled["metric"])
    by_round = pooled.assign(name=names).pivot(index="name", columns="round", values="value")
    by_round.loc["perplexity_ratio"] = by_round.loc["perplexity_heldout"] / by_round.loc["perplexity_train"]
    # Only the rounds that were evaluated have columns: reindex fills any other round with NaN.
    by_round = by_round.reindex(columns=[last, 0] if last else [0, 0])
    after, before = by_round.iloc[:, 0], by_round.iloc[:, 1]
    return after.to_dict() | before.add_suffix("_before").to_dict()
