"""What a model answers to test rows, and how well it predicts rows that it saw and rows that it did not.

Measured on one model as it is, before or after training: this module does not know how it was trained, nor where it is
kept. What comes out is the table of `fedmem.train.utility`.

Which rows: a client's first by the SHA-256 of their row_id, the same in every run, so a larger number contains the
smaller. Test and held-out rows whose input a client trained on are no measure of what is new, and are never chosen.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from rouge_score.rouge_scorer import RougeScorer
from sklearn.metrics import accuracy_score, f1_score

from fedmem.models.config_files import context_tokens
from fedmem.models.decoding import Decoding
from fedmem.models.examples import encode, render
from fedmem.models.text_generation import Written, write
from fedmem.train.local_training import evaluate_loss, quiet_libraries
from fedmem.train.utility import UTILITY

SPLITS = ("train", "test", "heldout")
BATCH = 16  # rows answered or measured at once; config.batch_size is training's, and must not change these figures


def measure(
    model, tokenizer, rows: pd.DataFrame, config, task: str, server_round: int, clients: Sequence[int] | None = None
) -> pd.DataFrame:
    """Utility and perplexities of a model on the rows of each client: the columns UTILITY, without POOLED.

    rows: row_id, client, split, instruction, input, output. config: utility_rows, utility_tokens, perplexity_rows,
    max_tokens, torch_threads. task: summarization, dialog, qa or classification. server_round: noted as it is, 0 being
    the model before training. clients: whose rows; None is everybody (where each client has a model of its own, call
    this for each). Nothing is drawn at random, the model is left as it was, and a client's figures do not depend on
    who else is measured (but for two tokens that are equal to a float's rounding). `utility.with_weighted_means` adds
    the mean.
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
    """The ids up to the assistant's turn, as training saw them, and whether the end of the input was cut off.

    At most `most` ids: the template and the instruction stay, the input loses its last tokens. None where that would
    leave nothing of the input.
    """
    example = render(tokenizer, row)
    encoded = tokenizer(example.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    end = next((i for i, (_, stop) in enumerate(offsets) if stop > example.response_start), len(ids))
    first, last = example.input_span
    inside = [i for i in range(end) if offsets[i][0] >= first and offsets[i][1] <= last]
    excess = max(end - most, 0)
    if excess >= len(inside):
        return None
    dropped = set(inside[len(inside) - excess :])
    return [token for i, token in enumerate(ids[:end]) if i not in dropped], excess > 0


def answer_scores(task: str, answers: Sequence[str], outputs: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """{metric: value} of answers beside the rows' outputs; NaN without any.

    classification: accuracy, and macro-F1 over the `labels` (normalised, see `label`; those of the outputs belong to
    them anyway): a label that neither an output nor an answer has is 0/0 and left out; an answer that is no label is
    wrong and nothing else. Other tasks: the mean of `rouge_l`.
    """
    if task != "classification":
        scores = [rouge_l(answer, output) for answer, output in zip(answers, outputs, strict=True)]
        return {"rouge_l": float(np.mean(scores)) if scores else math.nan}
    if not answers:
        return {"accuracy": math.nan, "macro_f1": math.nan}
    given, true = [class_label(answer) for answer in answers], [class_label(output) for output in outputs]
    known = sorted({*labels, *true})
    f1 = f1_score(true, given, labels=known, average="macro", zero_division=np.nan)
    return {"accuracy": float(accuracy_score(true, given)), "macro_f1": float(f1)}


def rouge_l(answer: str, output: str) -> float:
    """ROUGE-L F1 in 0 … 1: the longest common subsequence of words, stemmed (Lin 2004; the rouge-score library).

    Words are runs of a–z and 0–9 in lower case, as in that library: texts in other scripts score 0.
    """
    return _ROUGE.score(output, answer)["rougeL"].fmeasure


def class_label(text: str) -> str:
    """A class as answers and outputs are compared: the first line, without white space around it, in lower case."""
    lines = text.strip().splitlines()
    return lines[0].strip().lower() if lines else ""


_ROUGE = RougeScorer(["rougeL"], use_stemmer=True)


def _utility(model, tokenizer, rows, usable, config, task: str, clients: Sequence[int]) -> list[tuple]:
    """The lines of every client's test rows; all clients' prompts are answered in the same batches."""
    labels = {class_label(output) for output in rows.loc[rows["split"] == "train", "output"]}
    context = context_tokens(model.config)
    most = config.max_tokens if context is None else min(config.max_tokens, context - config.utility_tokens)
    answerable = usable[usable["output"].str.strip() != ""]
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
    greedy = Decoding.of("greedy")
    return write(model, tokenizer, prompts, greedy, max_new_tokens, 0, BATCH, "answer", "row") if prompts else []


def _perplexity(model, tokenizer, rows: pd.DataFrame, config) -> tuple[float, int, int, int, int]:
    """(exp of the mean nats per predicted token, rows, predicted tokens, rows cut at max_tokens, 0).

    All tokens of an example are predicted, whatever training's loss covers.
    """
    examples = encode(tokenizer, _first(rows, config.perplexity_rows), config.max_tokens)
    by_length = sorted(examples, key=lambda example: len(example["input_ids"]))  # little padding
    nats, tokens = evaluate_loss(model, by_length, BATCH)
    return float(np.exp(nats)), len(examples), tokens, examples.n_truncated, 0


def _of(rows: pd.DataFrame, client: int, split: str) -> pd.DataFrame:
    return rows[(rows["client"] == client) & (rows["split"] == split)]


def _first(rows: pd.DataFrame, count: int) -> pd.DataFrame:
    order = sorted(range(len(rows)), key=lambda i: hashlib.sha256(rows["row_id"].iloc[i].encode()).digest())
    return rows.iloc[order[:count]]
