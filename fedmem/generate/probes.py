"""What the model is asked, what is looked up, and what the model writes: prefixes, suffixes and continuations.

Inputs are cut by the tokenizer's own offsets, so the ids of a prompt are the ids that training saw. Decoding is
exact: only what was asked for acts, whatever the checkpoint's generation_config or the library's defaults say, and a
continuation depends on (decode seed, prompt, decoding) alone. This module does not depend on how the model was trained,
nor on what a match is.
"""

import hashlib
from collections.abc import Sequence

import pandas as pd

from fedmem.config.stages import GenerateConfig
from fedmem.models.config_files import context_tokens
from fedmem.models.decoding import Decoding
from fedmem.models.examples import Example, render
from fedmem.models.text_generation import decode, write

CHUNK = 500  # rows tokenised at once: the offsets of 90,000 rows would take gigabytes


class GenerationError(ValueError):
    """A request cannot be met; the message names the parameter, what it got, what is expected, and what to do."""


def split_inputs(rows: pd.DataFrame, tokenizer, config: GenerateConfig) -> pd.DataFrame:
    """Cut every row's input into a prefix of `prefix_tokens` tokens and a suffix; return one line per row.

    rows: the partition table.
    tokenizer: the model's; the whole training example is tokenised, as in training.
    config: prefix_tokens (the cut is after the prefix's last token, or after the character that this token splits) and
        least_input_tokens.

    Returns a DataFrame with row_id, client, split, input, input_tokens, long_enough, prefix, suffix (prefix + suffix ==
    input, character by character), prompt_ids (list of ids: start of the template and prefix, as training saw them),
    round_trip (whether decoding the example's ids gives its text again). `long_enough` is False for inputs of fewer
    than least_input_tokens tokens or without a suffix: they are listed to be counted, and `sample` leaves them out.
    """
    lines = []
    for first in range(0, len(rows), CHUNK):
        chunk = rows.iloc[first : first + CHUNK].to_dict("records")
        examples = [render(tokenizer, row) for row in chunk]
        encoded = tokenizer(
            [example.text for example in examples], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        for row, example, row_ids, row_offsets in zip(chunk, examples, ids, offsets, strict=True):
            # special tokens are kept: the template consists of them
            back = decode(tokenizer, row_ids, skip_special_tokens=False)
            cut = _cut(row["input"], example, row_ids, row_offsets, config.prefix_tokens)
            cut["long_enough"] = cut["input_tokens"] >= config.least_input_tokens and cut["suffix"].strip() != ""
            kept = {key: row[key] for key in ("row_id", "client", "split", "input")}
            lines.append(kept | cut | {"round_trip": back == example.text})
    return pd.DataFrame(lines)


def _cut(text: str, example: Example, ids: list[int], offsets: list[tuple[int, int]], n: int) -> dict:
    """Return one input's number of tokens, prefix of `n` tokens, suffix and prompt ids.

    text: the row's input. example: its training example, whose input is stripped. ids, offsets: the example's tokens.
    """
    begin, end = example.input_span
    first = next(i for i, (_, stop) in enumerate(offsets) if stop > begin)
    last = next((i for i in range(first, len(offsets)) if offsets[i][0] >= end), len(offsets))
    stop = min(first + n, last)
    while stop < last and offsets[stop][0] < offsets[stop - 1][1]:  # the token ends inside a character
        stop += 1
    cut = min(offsets[stop - 1][1], end)
    # Characters that no token covers were composed with the one before (NFC) and belong to the prefix; uncovered white
    # space may just be missing from the offsets, and belongs to the suffix.
    cut += len(example.text[cut : offsets[stop][0] if stop < last else end].rstrip())
    # white space before the input is in the row, but not in the example
    position = cut - begin + len(text) - len(text.lstrip())
    return {
        "input_tokens": last - first,
        "prefix": text[:position],
        "suffix": text[position:],
        "prompt_ids": ids[:stop],
    }


def lengths(texts: pd.DataFrame) -> pd.DataFrame:
    """Count the rows that can be probed, from the table of `split_inputs`, one line per client and split.

    Returns a DataFrame with client, split, rows, long_enough (number of rows), share (long_enough / rows, 0 … 1),
    shared_prefix (long enough rows whose prefix another long enough row, of any client, has too), unequal_round_trip
    (rows whose text the tokenizer does not reproduce).
    """
    long = texts[texts["long_enough"]]
    shared = long["prefix"].duplicated(keep=False).reindex(texts.index, fill_value=False)
    marked = texts.assign(shared_prefix=shared, unequal_round_trip=~texts["round_trip"])
    table = marked.groupby(["client", "split"], sort=True).agg(
        rows=("row_id", "size"),
        long_enough=("long_enough", "sum"),
        share=("long_enough", "mean"),
        shared_prefix=("shared_prefix", "sum"),
        unequal_round_trip=("unequal_round_trip", "sum"),
    )
    return table.reset_index()


def sample(
    texts: pd.DataFrame, n_prefixes: int, n_suffixes: int | None, seed: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Draw the prefixes that the model is prompted with and the suffixes that are searched, per client.

    texts: the table of `split_inputs`.
    n_prefixes: number of prefixes per client, >= 0, from long enough training rows, one row per distinct input.
    n_suffixes: number of member suffixes per client, and of held-out suffixes; None: n_prefixes. Member suffixes are
        those of the prefixes' rows first; held-out suffixes come from held-out rows whose input no client trained on.
    seed: fixes, with the row_id, the order of a client's rows: a larger sample contains the smaller one, and the place
        of a row depends on no other row.

    A partition without held-out rows has no held-out suffixes, and so no control. Returns (prefixes, suffixes), with
    the columns prefix_id, client, row_id, prefix, prompt_ids and suffix_id, client, row_id, member, suffix.
    Raises GenerationError, which names the client, when a client has too few such rows.
    """
    n_suffixes = n_prefixes if n_suffixes is None else n_suffixes
    train, heldout = drawable(texts, seed)
    n_controls = n_suffixes if (texts["split"] == "heldout").any() else 0
    clients = sorted(texts["client"].unique())
    prefixes = _first(train, clients, n_prefixes, "prefixes", "training rows")
    members = _first(train, clients, n_suffixes, "member suffixes", "training rows")
    controls = _first(
        heldout, clients, n_controls, "held-out suffixes", "held-out rows (input unlike all training rows)"
    )
    suffixes = pd.concat([members.assign(member=True), controls.assign(member=False)], ignore_index=True)
    suffixes = suffixes.astype({"member": bool})  # an empty control would make the column's type object
    return (
        _named(prefixes, "prefix_id", "p")[["prefix_id", "client", "row_id", "prefix", "prompt_ids"]],
        _named(suffixes, "suffix_id", "s")[["suffix_id", "client", "row_id", "member", "suffix"]],
    )


def drawable(texts: pd.DataFrame, seed: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows that `sample` draws from, in its order, by client: (training rows, held-out rows).

    All are long enough and, within a client, have distinct inputs; no client trained on a held-out row's input.
    """
    # a hash instead of a random generator: the place of a row depends on no other row
    order = texts["row_id"].map(lambda row_id: hashlib.sha256(f"{seed}|{row_id}".encode()).digest())
    usable = texts.assign(order=order)[texts["long_enough"]].sort_values(["client", "order"])
    trained = texts.loc[texts["split"] == "train", "input"]
    train = usable[usable["split"] == "train"]
    heldout = usable[(usable["split"] == "heldout") & ~usable["input"].isin(trained)]
    return train.drop_duplicates(["client", "input"]), heldout.drop_duplicates(["client", "input"])


def _first(rows: pd.DataFrame, clients: list[int], count: int, what: str, source: str) -> pd.DataFrame:
    had = rows["client"].value_counts().reindex(clients, fill_value=0)
    for client in clients:
        if had[client] < count:
            raise GenerationError(
                f"client {client} has {had[client]} {source} that are long enough and distinct, and {count} {what} "
                "were requested; lower n_prefixes, n_suffixes, prefix_tokens or min_input_tokens, or deal more rows"
            )
    return rows.groupby("client", sort=True).head(count).reset_index(drop=True)


def _named(rows: pd.DataFrame, column: str, letter: str) -> pd.DataFrame:
    return rows.assign(**{column: letter + rows["client"].astype(str) + "-" + rows["row_id"]})


def continue_prefixes(
    model, tokenizer, prompts: Sequence[Sequence[int]], decoding: Decoding, config: GenerateConfig
) -> pd.DataFrame:
    """Let the model continue each prompt until the end-of-sequence or end-of-turn token, or max_new_tokens.

    model, tokenizer: a causal language model and its tokenizer.
    prompts: sequences of token ids, as in `split_inputs`; padded on the left and masked.
    decoding: how tokens are chosen.
    config: max_new_tokens (the largest number of new tokens, without the prompt), decode_seed (of the sampling; greedy
        decoding ignores it), generate_batch (prompts per batch).

    Returns a DataFrame with the index of `prompts` (a list gets 0, 1, …): continuation (string without special tokens,
    spaces unchanged), new_tokens (without the stop token), finished (whether a stop token was generated), decoding (the
    settings in effect). A line depends on the model, decode_seed, its prompt and `decoding`; it does not depend on the
    order, and on the batch size only when the model's floats round differently in another batch and the scores of two
    tokens are equal to about 1e-6. Shows a progress bar.

    Raises GenerationError, before any work, when a prompt and its continuation exceed the model's context.
    """
    index = prompts.index if isinstance(prompts, pd.Series) else None
    prompts = [list(prompt) for prompt in prompts]
    # checked for the longest prompt before any work: beyond its context a model fails, or writes nonsense
    if reason := config.beyond_context(context_tokens(model.config), max(map(len, prompts), default=0)):
        raise GenerationError(reason)
    new, seed, batch = config.max_new_tokens, config.decode_seed, config.generate_batch
    lines = write(model, tokenizer, prompts, decoding, new, seed, batch)
    frame = pd.DataFrame(lines, columns=["continuation", "new_tokens", "finished"], index=index)
    return frame.assign(decoding=str(decoding))
