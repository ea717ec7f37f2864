"""One local training of a causal language model, and its loss on rows it is not trained on.

A client of a federation and the central baseline, which is one client with all rows, use the same step. The two
therefore differ only in the rows and the averaging. This module does not depend on messages or folders: it takes a
model and a dataset of `input_ids` and `labels` (`fedmem.models.examples.encode`) and changes the model in place. The
caller
passes the position of the round in the run, on which the learning rate depends.
"""

import contextlib
import gc
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from fedmem.models.config_files import context_tokens
from fedmem.models.examples import IGNORED, pad_batch
from fedmem.train.local_trainer import (
    LocalTrainer,
    Step,
    TrainingError,
    n_predicted,
    trained_parameters,
    training_arguments,
)


@dataclass(frozen=True)
class LocalResult:
    """The figures of one local training over all steps, and each step in `course`.

    n_examples: distinct rows that were used, the weight of this training in an average; steps: optimizer steps;
    tokens: predicted tokens; loss: mean over the tokens, in nats; penalty: mean over the steps. Loss and penalty of a
    step are measured before the step, so they are not those of the final weights.
    """

    n_examples: int
    steps: int
    tokens: int
    loss: float
    penalty: float
    course: tuple[Step, ...]


def steps_per_round(n_rows: int, config) -> int:
    """The number of optimizer steps of one client in one round: `local_steps`, or `local_epochs` passes over its rows.

    n_rows: usable rows (≥ 1; see `usable`); config: local_steps, local_epochs, batch_size (rows per step). The last
    step of a pass takes the remaining rows.
    """
    # ceil, because a pass ends with a smaller batch: no step mixes rows of two passes
    return config.local_steps or config.local_epochs * math.ceil(n_rows / config.batch_size)


def learning_rate(step: int, total_steps: int, config) -> float:
    """The learning rate of one step of a run: `config.schedule` after the warm-up.

    step: 0 … total_steps − 1.
    total_steps: optimizer steps of the whole run, ≥ 1.
    config: learning_rate (the peak), warmup_share (0 … 1), schedule (constant, linear or cosine).

    In the first ⌈warmup_share · total_steps⌉ steps the rate rises linearly to `config.learning_rate`. Then it stays
    constant, or falls to 0 linearly or along half a cosine wave. The step after the last one would have rate 0, so
    every step has a positive rate.
    """
    warmup = math.ceil(config.warmup_share * total_steps - 1e-9)  # 0.1 · 30 is a little more than 3 in floats
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    share = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.schedule]
    return config.learning_rate * share


def derive_seed(train_seed: int, server_round: int, client: int) -> int:
    """The seed of one client in one round; it does not depend on the order in which clients are trained.

    train_seed: seed of the whole training. server_round: number of the round. client: number of the client. All three
    are integers ≥ 0. Returns an integer in 0 … 2³² − 1.
    """
    # SeedSequence instead of a sum: round 1 of client 2 and round 2 of client 1 would have the same sum
    return int(np.random.SeedSequence([train_seed, server_round, client]).generate_state(1)[0])


@contextlib.contextmanager
def quiet_libraries(torch_threads: int | None = None) -> Iterator[None]:
    """Use `torch_threads` torch threads and silence Flower and transformers within the block; restore both afterwards.

    torch_threads: number of threads, ≥ 1; None keeps the current number. The INFO lines (a dozen per round) and loading
    bars of the two libraries would flood a notebook; errors are still raised or logged.
    """
    threads, flower = torch.get_num_threads(), logging.getLogger("flwr")
    with contextlib.ExitStack() as restored:
        restored.callback(torch.set_num_threads, threads)
        restored.callback(transformers_logging.set_verbosity, transformers_logging.get_verbosity())
        restored.callback(flower.setLevel, flower.level)
        if transformers_logging.is_progress_bar_enabled():
            restored.callback(transformers_logging.enable_progress_bar)
        torch.set_num_threads(torch_threads or threads)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        flower.setLevel(logging.ERROR)
        yield


@contextlib.contextmanager
def _older_objects_set_aside() -> Iterator[None]:
    """Exclude existing objects from garbage collection within the block: accelerate collects at every start (0.2 s)."""
    # unfreeze() releases everything, so it is left out when the caller has frozen objects of its own
    frozen_by_caller = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_by_caller:
            gc.unfreeze()


def usable(dataset: Sequence[Mapping]) -> list[Mapping]:
    """The rows of a dataset with at least one predicted token; the first token of a row is never predicted."""
    # by index: a map-style dataset need not be iterable
    rows = (dataset[index] for index in range(len(dataset)))
    return [row for row in rows if any(label != IGNORED for label in row["labels"][1:])]


def _check(model, dataset: Sequence, rows: Sequence, config) -> None:
    """Raise TrainingError, before any step, when the training cannot work."""
    if not rows:
        raise TrainingError(f"none of the {len(dataset)} rows has a token to predict. Raise max_tokens, or add rows.")
    if not trained_parameters(model):
        raise TrainingError("the model has no parameter to train: all are frozen. Unfreeze some before training.")
    context = context_tokens(model.config)
    if context is not None and config.max_tokens > context:
        raise TrainingError(
            f"max_tokens: got {config.max_tokens}; expected at most {context}, the tokens of the model's context."
        )
    if (
        config.precision == "bf16"
        and model.device.type == "cuda"
        # torch counts emulated bf16 as supported by default
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise TrainingError(
            f"precision bf16: {torch.cuda.get_device_name(model.device)} does not compute in bf16. Set precision: fp32."
        )


def train_locally(
    model,
    dataset: Sequence[Mapping],
    *,
    config,
    seed: int,
    proximal_mu: float = 0.0,
    steps: int | None = None,
    first_step: int = 0,
    total_steps: int | None = None,
) -> LocalResult:
    """Train a model on a dataset for some steps, in place, on the model's device; the model ends in eval mode.

    Uses AdamW with new moments and gradients clipped to norm 1. Each pass takes every row once, in an order drawn from
    `seed` alone. The loss of a step is the mean cross-entropy over all its predicted tokens.

    model: a causal language model of transformers, with or without adapters; it is changed in place.
    dataset: rows with `input_ids` and `labels` (lists of token ids; −100 = not predicted).
    config: a TrainConfig, of which this function uses learning_rate, schedule, warmup_share, batch_size (rows per
    step), gradient_accumulation, gradient_checkpointing, weight_decay, precision, max_tokens, torch_threads, and for
    the number of steps local_steps or local_epochs.
    seed: 0 … 2³² − 1; it also seeds Python, numpy and torch (dropout), as every Trainer does.
    proximal_mu: μ ≥ 0. If μ > 0, the loss includes (μ/2)·‖w − w_t‖² over the trained parameters, where w_t are the
    weights at the start of this call (FedProx, Li et al. 2020, algorithm 2).
    steps: optimizer steps; by default `steps_per_round` of the usable rows.
    first_step, total_steps: the steps are number `first_step`, `first_step` + 1, … of a run of `total_steps` (default:
    up to the last of them). They determine the learning rates, so that a schedule continues from call to call.

    Raises TrainingError when no row is usable, no parameter is trainable, max_tokens exceeds the model's context, the
    steps go beyond total_steps, the device lacks bf16, or a loss is not finite (the message names the step).
    """
    rows = usable(dataset)
    _check(model, dataset, rows, config)
    steps = steps or steps_per_round(len(rows), config)
    total_steps = total_steps or first_step + steps
    if first_step + steps > total_steps:
        raise TrainingError(f"steps {first_step} … {first_step + steps - 1} go beyond a run of {total_steps} steps.")
    # The Trainer's output folder is temporary: nothing is saved in it.
    with quiet_libraries(config.torch_threads), _older_objects_set_aside(), tempfile.TemporaryDirectory() as folder:
        trainer = LocalTrainer(
            model=model,
            args=training_arguments(model, config, steps, seed, folder),
            data_collator=pad_batch,
            train_dataset=rows,
            config=config,
            rates=[learning_rate(step, total_steps, config) for step in range(first_step, first_step + steps)],
            proximal_mu=proximal_mu,
        )
        try:
            trainer.train()
        finally:
            trainer.release()  # also after an error: the caller may train the model again
            model.eval()
    return _result(trainer.course, min(len(rows), steps * config.batch_size))


def _result(course: list[Step], n_examples: int) -> LocalResult:
    # A step's loss is a mean over its tokens, so the mean over all tokens weighs each step by its tokens.
    tokens = sum(step.tokens for step in course)
    loss = sum(step.loss * step.tokens for step in course) / tokens
    penalty = sum(step.penalty for step in course) / len(course)
    return LocalResult(n_examples, len(course), tokens, loss, penalty, tuple(course))


@torch.no_grad()
def evaluate_loss(model, dataset: Sequence[Mapping], batch_size: int) -> tuple[float, int]:
    """The mean cross-entropy per predicted token, in nats, and the number of predicted tokens.

    model: a causal language model; it is evaluated on its own device and keeps its mode (train or eval).
    dataset: rows with `input_ids` and `labels`, as for `train_locally`.
    batch_size: rows per forward pass, ≥ 1.

    Uses no random numbers. Returns (nan, 0) for a dataset without a predicted token.
    """
    rows, was_training = usable(dataset), model.training
    model.eval()
    total, tokens = 0.0, 0
    for start in range(0, len(rows), batch_size):
        batch = pad_batch(rows[start : start + batch_size])
        predicted = n_predicted(batch)
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        # the model returns the mean over the batch's predicted tokens
        total += model(**batch, use_cache=False).loss.item() * predicted
        tokens += predicted
    model.train(was_training)
    return (total / tokens if tokens else math.nan), tokens
