"""Records what a training measures and which rounds are complete, so that an interrupted training can continue.

In every table here, `client` is a client's id, 0 … L − 1, or `POOLED` for the rows of all clients together.

The table of task metrics and perplexities has the columns UTILITY: round, client, metric, split, value, n (rows behind
the value), tokens (written in answers, or predicted), cut (rows that were too long and lost their end), left_out
(chosen rows without room for an answer). Its metrics: rouge_l (summarization, dialog, qa), accuracy and macro_f1
(classification), all in 0 … 1, on test rows; perplexity, 1 or more, on train, test and heldout rows. A value without
rows is NaN, never 0. `fedmem.train.evaluation` measures the values; this module does not load a model.
"""

import resource
from collections.abc import Mapping

import numpy as np
import pandas as pd

from fedmem.config.vocabulary import POOLED

CURVES = ["round", "client", "metric", "value", "examples", "tokens", "steps"]
UTILITY = ["round", "client", "metric", "split", "value", "n", "tokens", "cut", "left_out"]


class History:
    """Figures that the seeds determine, and, in a table of their own, seconds.

    progress: storage for them after each round (`Work.progress`), from which the records of an interrupted run are
        restored; None: nothing is stored.
    """

    def __init__(self, progress=None):
        self.progress = progress
        kept = progress.value if progress else {}
        self._figures = [tuple(line) for line in kept.get("figures", [])]
        self._seconds = [tuple(line) for line in kept.get("seconds", [])]
        self.rounds: dict[str, int] = dict(kept.get("rounds", {}))

    def add(
        self, server_round: int, client: int, values: Mapping[str, float], examples: int, tokens: int, steps: int = 0
    ) -> None:
        """Record figures of one client in one round.

        server_round: 0 (before training) … rounds. client: its id, or POOLED. values: {metric: value}.
        examples, tokens, steps: number of rows, predicted tokens and optimizer steps behind the values, >= 0.
        """
        # plain Python numbers: the records are stored as JSON
        counts = int(examples), int(tokens), int(steps)
        self._figures += [(int(server_round), int(client), name, float(v), *counts) for name, v in values.items()]

    def add_seconds(self, server_round: int, client: int, part: str, seconds: float) -> None:
        """Record a duration.

        server_round: 0 … rounds. client: its id, or POOLED. part: train or checkpoint. seconds: >= 0.
        """
        self._seconds.append((int(server_round), int(client), part, float(seconds)))

    def keep(self, name: str, server_round: int, arrays: Mapping | None = None) -> None:
        """Record that a federation's round is complete on disk: an interrupted run continues after it.

        name: name of the federation's folder of rounds.
        server_round: number of the round, 0 … rounds.
        arrays: the state of its strategy, {name: numpy array}; None: it has none.
        """
        self.rounds[name] = server_round
        if self.progress is not None:
            value = {"rounds": self.rounds, "figures": self._figures, "seconds": self._seconds}
            self.progress.keep(value, arrays)

    def forget(self) -> None:
        """Delete the stored records, so that no run continues from them."""
        if self.progress is not None:
            self.progress.forget()

    def kept_arrays(self) -> dict:
        """Return the state of an interrupted run's strategy, {name: numpy array}; empty without one."""
        return self.progress.arrays() if self.progress is not None else {}

    def curves(self) -> pd.DataFrame:
        """Return a DataFrame (round, client, metric, value, examples, tokens, steps), one row per figure.

        metric: train_loss (nats per predicted token, mean over the round's steps, without the penalty), penalty
        (mean of (μ/2)·‖w − w_t‖² over the steps), drift (‖w − w_t‖ at the client's end, before any clipping),
        test_loss (nats per predicted token of the global model after the round; round 0 is before training).
        """
        # a stable sort: figures with equal keys keep the order in which they were recorded
        return pd.DataFrame(self._figures, columns=CURVES).sort_values(
            ["round", "client", "metric"], kind="stable", ignore_index=True
        )

    def seconds(self) -> pd.DataFrame:
        """Return a DataFrame (round, client, part, seconds), one row per record."""
        return pd.DataFrame(self._seconds, columns=["round", "client", "part", "seconds"])

    def costs(self) -> pd.DataFrame:
        """Return a DataFrame of one row: seconds of training and of checkpoints (with their test losses), tokens
        trained per second, peak memory of this process and of the GPU in MiB (NaN without a GPU).
        """
        import torch  # here, because the report reads utility without it

        curves, parts = self.curves(), self.seconds().groupby("part")["seconds"].sum()
        trained, spent = curves.loc[curves["metric"] == "train_loss", "tokens"].sum(), parts.get("train", 0.0)
        on_gpu = torch.cuda.is_available()
        return pd.DataFrame(
            {
                "seconds_training": [spent],
                "seconds_checkpoints": [parts.get("checkpoint", 0.0)],
                "tokens_per_second": [trained / spent if spent else float("nan")],
                "host_mib": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024],  # ru_maxrss is in KiB on Linux
                "gpu_mib": [torch.cuda.max_memory_allocated() / 2**20 if on_gpu else float("nan")],
            }
        ).round(1)


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
