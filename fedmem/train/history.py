"""What a training measures as it goes, and how far it came, so that an interrupted one can go on.

In every table here `client` is a client's id, 0 … L − 1, or `POOLED` for the rows of all clients together.
"""

import resource
from collections.abc import Mapping

import pandas as pd
import torch

CURVES = ["round", "client", "metric", "value", "examples", "tokens", "steps"]


class History:
    """Figures that the seeds determine, and, apart from them, seconds.

    progress: where to keep them after each round (`Work.progress`); what an interrupted run kept there is taken up.
    None keeps nothing.
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
        """Note figures of one client in one round, by metric name; `steps` are optimizer steps."""
        counts = int(examples), int(tokens), int(steps)
        self._figures += [(int(server_round), int(client), name, float(v), *counts) for name, v in values.items()]

    def add_seconds(self, server_round: int, client: int, part: str, seconds: float) -> None:
        """Note how long a part (train, checkpoint) took."""
        self._seconds.append((int(server_round), int(client), part, float(seconds)))

    def keep(self, name: str, server_round: int, arrays: Mapping | None = None) -> None:
        """Note that a federation's round is whole on disk: an interrupted run goes on after it.

        name: of the federation's folder of rounds. arrays: what its strategy must remember, numpy arrays by name.
        """
        self.rounds[name] = server_round
        if self.progress is not None:
            value = {"rounds": self.rounds, "figures": self._figures, "seconds": self._seconds}
            self.progress.keep(value, arrays)

    def forget(self) -> None:
        """Have nobody take up what was kept."""
        if self.progress is not None:
            self.progress.forget()

    def kept_arrays(self) -> dict:
        """What the strategy of an interrupted run had to remember, numpy arrays by name."""
        return self.progress.arrays() if self.progress is not None else {}

    def curves(self) -> pd.DataFrame:
        """DataFrame (round, client, metric, value, examples, tokens, steps), one row a figure.

        metric: train_loss (nats per predicted token, mean over the round's steps, without the penalty), penalty
        (mean of (μ/2)·‖w − w_t‖² over the steps), drift (‖w − w_t‖ at the client's end, before any clipping),
        test_loss (nats per predicted token of the global model after the round; round 0 is before training).
        """
        return pd.DataFrame(self._figures, columns=CURVES).sort_values(
            ["round", "client", "metric"], kind="stable", ignore_index=True
        )

    def seconds(self) -> pd.DataFrame:
        """DataFrame (round, client, part, seconds)."""
        return pd.DataFrame(self._seconds, columns=["round", "client", "part", "seconds"])

    def costs(self) -> pd.DataFrame:
        """DataFrame, one row: seconds of training and of checkpoints (with their test losses), trained tokens a second,
        highest memory of this process and of the GPU in MiB (NaN where there is none)."""
        curves, parts = self.curves(), self.seconds().groupby("part")["seconds"].sum()
        trained, spent = curves.loc[curves["metric"] == "train_loss", "tokens"].sum(), parts.get("train", 0.0)
        on_gpu = torch.cuda.is_available()
        return pd.DataFrame(
            {
                "seconds_training": [spent],
                "seconds_checkpoints": [parts.get("checkpoint", 0.0)],
                "tokens_per_second": [trained / spent if spent else float("nan")],
                "host_mib": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024],  # Linux counts in KiB
                "gpu_mib": [torch.cuda.max_memory_allocated() / 2**20 if on_gpu else float("nan")],
            }
        ).round(1)
