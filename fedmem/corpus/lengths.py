"""Which texts are long enough to be matched at all: the same table before detection and in the analysis."""

from __future__ import annotations

import numpy as np
import pandas as pd


def measurable(prefixes: pd.DataFrame, suffixes: pd.DataFrame, min_match_chars: int = 50) -> pd.DataFrame:
    """Count the texts that can match at all: a text shorter than `min_match_chars` characters never matches.

    prefixes: DataFrame with client, continuation. suffixes: DataFrame with client, member, suffix.
    min_match_chars: shortest match of the detector, in characters, >= 1.

    Returns a DataFrame with client, text (continuation | member suffix | held-out suffix), n, long_enough (how many
    reach the length), share (0 … 1), median_chars. A client without such texts has no line. Raises KeyError when a
    column is missing.
    """
    member = np.where(suffixes["member"].to_numpy(dtype=bool), "member suffix", "held-out suffix")
    parts = [
        pd.DataFrame({"client": suffixes["client"], "text": member, "chars": suffixes["suffix"].str.len()}),
        pd.DataFrame(
            {"client": prefixes["client"], "text": "continuation", "chars": prefixes["continuation"].str.len()}
        ),
    ]
    texts = pd.concat(parts, ignore_index=True)
    texts["enough"] = texts["chars"] >= min_match_chars
    table = texts.groupby(["client", "text"], as_index=False).agg(
        n=("chars", "size"), long_enough=("enough", "sum"), share=("enough", "mean"), median_chars=("chars", "median")
    )
    return table.astype({"long_enough": int})
