"""One local training of a causal language model, and its loss on rows it is not trained on.

The same step serves a client of a federation and the central baseline, which is a client that has all rows, so the
two differ in nothing but the rows and the averaging. It knows nothing of messages or folders: it takes a model and a
dataset of `input_ids` and `labels` (`fedmem.models.examples.encode`) and changes the model in place. Where a round
stands in a
run it is told, for the learning rate's sake.
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
    """One local training: its figures over all steps, and `course`, the steps one by one.

    n_examples: different rows that were used, the weight of this training in an average; steps: optimizer steps;
    tokens: predicted tokens; loss: mean over the tokens, in nats; penalty: mean over the steps. Loss and penalty are
    measured on weights that move.
    """

    n_examples: int
    steps: int
    tokens: int
    loss: float
    penalty: float
    course: tuple[Step, ...]


def steps_per_round(n_rows: int, config) -> int:
    """Optimizer steps of one client in one round: `local_steps`, or `local_epochs` passes over its usable rows.

    n_rows: usable rows (≥ 1; see `usable`); config: local_steps, local_epochs, batch_size (rows per step). The last
    step of a pass takes the rows that are left.
    """
    return config.local_steps or config.local_epochs * math.ceil(n_rows / config.batch_size)


def learning_rate(step: int, total_steps: int, config) -> float:
    """The learning rate of step 0 … total_steps − 1 of a run: `config.schedule` after the warm-up.

    The first ⌈warmup_share · total_steps⌉ steps rise evenly and reach `config.learning_rate`. What follows stays
    there (constant), or falls evenly (linear) or by half a cosine wave (cosine) to 0, which the step after the last
    one would have: no step is made at rate 0.
    """
    warmup = math.ceil(config.warmup_share * total_steps - 1e-9)  # 0.1 · 30 is a little more than 3 in floats
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    share = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.schedule]
    return config.learning_rate * share


def derive_seed(train_seed: int, server_round: int, client: int) -> int:
    """A fresh seed for one client in one round, the same in whatever order clients are trained.

    All three are integers ≥ 0. The seeds of neighbouring rounds and clients share nothing (a sum would).
    """
    return int(np.random.SeedSequence([train_seed, server_round, client]).generate_state(1)[0])


@contextlib.contextmanager
def quiet_libraries(torch_threads: int | None = None) -> Iterator[None]:
    """Inside: `torch_threads` threads for torch, no chatter from Flower and transformers. Restored on leaving.

    Their INFO lines (a dozen a round) and loading bars would flood a notebook; errors still come through, as
    exceptions or as log lines.
    """
    threads, verbosity = torch.get_num_threads(), transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    flower = logging.getLogger("flwr")
    flower_level = flower.level
    torch.set_num_threads(torch_threads or threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    flower.setLevel(logging.ERROR)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        transformers_logging.set_verbosity(verbosity)
        flower.setLevel(flower_level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def _older_objects_set_aside() -> Iterator[None]:
    """Inside, garbage collection skips what exists already: accelerate collects at every start, 0.2 s a time."""
    frozen_by_caller = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_by_caller:
            gc.unfreeze()


def usable(dataset: Sequence[Mapping]) -> list[Mapping]:
    """The rows of a dataset on which at least one token is predicted (the first token of a row never is)."""
    rows = (dataset[index] for index in range(len(dataset)))
    return [row for row in rows if any(label != IGNORED for label in row["labels"][1:])]


def _check(model, dataset: Sequence, rows: Sequence, config) -> None:
    """Raise TrainingError for what cannot be trained, before any step."""
    if not rows:
        raise TrainingError(f"none of the {len(dataset)} rows has a token to predict. Raise max_tokens, or add rows.")
    if not trained_parameters(model):
        raise TrainingError("the model has no parameter to train: all are frozen. Unfreeze some before training.")
    context = context_tokens(model.config)
    if context is not None and config.max_tokens > context:
        raise TrainingError(
            f"max_tokens: got {config.max_tokens}; the model's context holds {context} tokens. Allowed is at most that."
        )
    if (
        config.precision == "bf16"
        and model.device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise TrainingError(
            f"precision bf16: {torch.cuda.get_device_name(model.device)} does not compute in it. Take precision: fp32."
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
    """Train a model on a dataset for some steps, in place, on the device where it is; it is left in eval mode.

    AdamW from fresh moments, gradients clipped to norm 1, every row once a pass in an order drawn from `seed` alone.
    The loss of a step is the mean cross-entropy over all its predicted tokens. With `proximal_mu` > 0 it gains
    (μ/2)·‖w − w_t‖² over the trained parameters, w_t being the weights at the start of this call (FedProx, Li et al.
    2020, algorithm 2).

    dataset: rows with `input_ids` and `labels` (lists of token ids; −100 = not predicted).
    config: a TrainConfig; what counts here are learning_rate, schedule, warmup_share, batch_size (rows per step),
    gradient_accumulation, gradient_checkpointing, weight_decay, precision, max_tokens, torch_threads, and for the
    number of steps local_steps or local_epochs.
    seed: 0 … 2³² − 1; it also seeds Python, numpy and torch (dropout), as every Trainer does.
    steps: optimizer steps, by default `steps_per_round` of the usable rows. They are steps `first_step`,
    `first_step` + 1, … of a run of `total_steps` (default: up to the last of them), which decides their learning
    rates: a schedule goes on from one call to the next.
    Raises TrainingError when no row can be used, nothing can be trained, max_tokens exceeds the model's context, the
    steps go beyond total_steps, the device lacks bf16, or a loss is not finite (with its step).
    """
    rows = usable(dataset)
    _check(model, dataset, rows, config)
    steps = steps or steps_per_round(len(rows), config)
    total_steps = total_steps or first_step + steps
    if first_step + steps > total_steps:
        raise TrainingError(f"steps {first_step} … {first_step + steps - 1} go beyond a run of {total_steps} steps.")
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
            trainer.release()
            model.eval()
    return _result(trainer.course, min(len(rows), steps * config.batch_size))


def _result(course: list[Step], n_examples: int) -> LocalResult:
    tokens = sum(step.tokens for step in course)
    loss = sum(step.loss * step.tokens for step in course) / tokens
    penalty = sum(step.penalty for step in course) / len(course)
    return LocalResult(n_examples, len(course), tokens, loss, penalty, tuple(course))


@torch.no_grad()
def evaluate_loss(model, dataset: Sequence[Mapping], batch_size: int) -> tuple[float, int]:
    """Mean cross-entropy per predicted token, in nats, and the number of predicted tokens.

    Draws nothing at random and leaves the model in the mode it had. A dataset without a predicted token gives
    (nan, 0).
    """
    rows, was_training = usable(dataset), model.training
    model.eval()
    total, tokens = 0.0, 0
    for start in range(0, len(rows), batch_size):
        batch = pad_batch(rows[start : start + batch_size])
        predicted = n_predicted(batch)
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        total += model(**batch, use_cache=False).loss.item() * predicted
        tokens += predicted
    model.train(was_training)
    return (total / tokens if tokens else math.nan), tokens
