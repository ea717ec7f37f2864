"""Utility of a model on test rows, and its perplexity on rows that it was trained on and rows that it was not.

The functions measure one given model, before or after training; they do not depend on how it was trained or stored. The
result is the table of `fedmem.train.history`.

Selection of rows: the first rows of a client by the SHA-256 of their row_id. The order is the same in every run, so a
larger selection contains the smaller ones. Test and held-out rows whose input a client trained on are never selected,
because the model has seen them.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from rouge_score.rouge_scorer import RougeScorer
from sklearn.metrics import accuracy_score, f1_score

from fedmem.config.vocabulary import SPLITS
from fedmem.models.config_files import context_tokens
from fedmem.models.decoding import Decoding
from fedmem.models.examples import encode, render
from fedmem.models.text_generation import Written, write
from fedmem.train.history import UTILITY
from fedmem.train.local_training import evaluate_loss, quiet_libraries

BATCH = 16  # rows per batch; not config.batch_size, which belongs to training and must not change these figures


def measure(
    model, tokenizer, rows: pd.DataFrame, config, task: str, server_round: int, clients: Sequence[int] | None = None
) -> pd.DataFrame:
    """Measure utility and perplexities of a model on the rows of each client.

    model, tokenizer: the model as it is; it is not changed.
    rows: DataFrame with row_id, client, split, instruction, input, output.
    config: settings utility_rows, utility_tokens, perplexity_rows, max_tokens, torch_threads.
    task: summarization, dialog, qa or classification.
    server_round: written into the table; 0 for the model before training.
    clients: ids of the clients to measure; None: all. Call once per client if each has its own model.

    Returns a DataFrame with the columns UTILITY, without rows of POOLED; `with_weighted_means` adds the mean.
    Nothing is
    random. A client's figures do not depend on which other clients are measured, except where two tokens' scores are
    equal up to float rounding.
    """
    clients = sorted(rows["client"].unique()) if clients is None else clients
    trained_on = set(rows.loc[rows["split"] == "train", "input"])
    usable = rows[(rows["split"] == "train") | ~rows["input"].isin(trained_on)]
    with quiet_libraries(config.torch_threads):
        lines = _utility(model, tokenizer, rows, usable, config, task, clients)
        lines += [
            (client, "perplexity", split, *_perplexity(model, tokenizer, _of(usable, client, split), config))
            for client in clients
            for split in SPLITS
        ]
    return pd.DataFrame([(server_round, *line) for line in lines], columns=UTILITY)


def answer_prompt(tokenizer, row, most: int) -> tuple[list[int], bool] | None:
    """Return (token ids up to the assistant's turn, whether the input was truncated), tokenized as in training.

    tokenizer: the model's. row: mapping with instruction, input, output.
    most: largest number of ids, >= 1; template and instruction are kept, and the input loses its last tokens.

    Returns None when no token of the input would be left.
    """
    example = render(tokenizer, row)
    encoded = tokenizer(example.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    end = next((i for i, (_, stop) in enumerate(offsets) if stop > example.response_start), len(ids))
    first, last = example.input_span
    inside = [i for i in range(end) if offsets[i][0] >= first and offsets[i][1] <= last]
    # a token that spans the border of the input also holds text of the template, so it is kept
    excess = max(end - most, 0)
    if excess >= len(inside):
        return None
    dropped = set(inside[len(inside) - excess :])
    return [token for i, token in enumerate(ids[:end]) if i not in dropped], excess > 0


def answer_scores(task: str, answers: Sequence[str], outputs: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """Compare answers with the rows' outputs: {metric: value}; NaN when there are no answers.

    task: "classification" gives accuracy and macro_f1; every other task gives rouge_l, the mean of `rouge_l`.
    answers, outputs: strings of equal number, in the same order.
    labels: the classes of macro-F1, normalised by `label`; the outputs' labels are always added.

    A label that neither an output nor an answer has is left out of macro-F1 (it would be 0/0). An answer that is not a
    label is a wrong answer but adds no class. Raises ValueError when answers and outputs differ in number.
    """
    if task != "classification":
        scores = [rouge_l(answer, output) for answer, output in zip(answers, outputs, strict=True)]
        return {"rouge_l": float(np.mean(scores)) if scores else math.nan}
    if not answers:
        return {"accuracy": math.nan, "macro_f1": math.nan}
    given, true = [class_label(answer) for answer in answers], [class_label(output) for output in outputs]
    known = sorted({*labels, *true})
    # without `labels`, every wrong answer of free text would count as a class of F1 = 0
    f1 = f1_score(true, given, labels=known, average="macro", zero_division=np.nan)
    return {"accuracy": float(accuracy_score(true, given)), "macro_f1": float(f1)}


def rouge_l(answer: str, output: str) -> float:
    """Return ROUGE-L F1 in 0 … 1: longest common subsequence of stemmed words (Lin 2004; the rouge-score library).

    Words are runs of a–z and 0–9 in lower case, as in that library, so texts in other scripts score 0.
    """
    return _ROUGE.score(output, answer)["rougeL"].fmeasure


def class_label(text: str) -> str:
    """Normalise a class label for comparison: the first line, stripped, in lower case."""
    lines = text.strip().splitlines()
    return lines[0].strip().lower() if lines else ""


# one scorer for all calls: it holds the stemmer
_ROUGE = RougeScorer(["rougeL"], use_stemmer=True)


def _utility(model, tokenizer, rows, usable, config, task: str, clients: Sequence[int]) -> list[tuple]:
    """Return the table's lines of all clients' test rows; the prompts of all clients share batches."""
    labels = {class_label(output) for output in rows.loc[rows["split"] == "train", "output"]}
    context = context_tokens(model.config)
    # the prompt must leave room for the answer in the model's context
    most = config.max_tokens if context is None else min(config.max_tokens, context - config.utility_tokens)
    answerable = usable[usable["output"].str.strip() != ""]  # an empty output cannot be scored
    asked = [_first(_of(answerable, client, "test"), config.utility_rows) for client in clients]
    asked = pd.concat(asked, ignore_index=True) if asked else answerable.iloc[:0]
    prompts = [answer_prompt(tokenizer, row, most) for row in asked.to_dict("records")]
    fits = [place for place, one in enumerate(prompts) if one is not None]
    answers = _answers(model, tokenizer, [prompts[place][0] for place in fits], config.utility_tokens)
    given = asked.iloc[fits].assign(
        answer=[answer.text for answer in answers],
        tokens=[answer.new_tokens for answer in answers],
        cut=[prompts[place][1] for place in fits],
    )
    lines = []
    for client in clients:
        own = given[given["client"] == client]
        left_out = int((asked["client"] == client).sum()) - len(own)
        scores = answer_scores(task, list(own["answer"]), list(own["output"]), labels)
        counts = len(own), int(own["tokens"].sum()), int(own["cut"].sum()), left_out
        lines += [(client, metric, "test", value, *counts) for metric, value in scores.items()]
    return lines


def _answers(model, tokenizer, prompts: list[list[int]], max_new_tokens: int) -> list[Written]:
    greedy = Decoding.of("greedy")  # no random draws: the figures depend on the model and the rows alone
    return write(model, tokenizer, prompts, greedy, max_new_tokens, 0, BATCH, "answer", "row") if prompts else []


def _perplexity(model, tokenizer, rows: pd.DataFrame, config) -> tuple[float, int, int, int, int]:
    """Return (exp of the mean nats per predicted token, rows, predicted tokens, rows cut at max_tokens, 0).

    All tokens of an example count, even if training's loss covers the response only.
    """
    examples = encode(tokenizer, _first(rows, config.perplexity_rows), config.max_tokens)
    by_length = sorted(examples, key=lambda example: len(example["input_ids"]))  # batches need less padding
    nats, tokens = evaluate_loss(model, by_length, BATCH)
    return float(np.exp(nats)), len(examples), tokens, examples.n_truncated, 0


def _of(rows: pd.DataFrame, client: int, split: str) -> pd.DataFrame:
    return rows[(rows["client"] == client) & (rows["split"] == split)]


def _first(rows: pd.DataFrame, count: int) -> pd.DataFrame:
    order = sorted(range(len(rows)), key=lambda i: hashlib.sha256(rows["row_id"].iloc[i].encode()).digest())
    return rows.iloc[order[:count]]
