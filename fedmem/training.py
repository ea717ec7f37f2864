"""One local training of a causal language model, and its loss on rows it is not trained on.

The same step serves a client of a federation and the central baseline, so that the two differ in nothing
but the rows and the averaging. It knows nothing of clients, rounds, messages or folders: it takes a model and
a dataset of `input_ids` and `labels` (`fedmem.models.encode`) and changes the model in place.
"""

import contextlib
import gc
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from fedmem.models import IGNORED, pad_batch

MAX_GRAD_NORM = 1.0  # the Trainer's own clipping, named because it is part of the method


class TrainingError(RuntimeError):
    """A local training that cannot give a usable model; the message says why."""


@dataclass(frozen=True)
class Losses:
    """What some training steps saw.

    steps: optimizer steps; tokens: predicted tokens; loss: mean cross-entropy per predicted token, in nats,
    without the penalty; penalty: mean proximal term (μ/2)·‖w − w_t‖² per step, 0 where there is none.
    Both are means over the course of the steps, so they are measured on weights that move.
    """

    steps: int
    tokens: int
    loss: float
    penalty: float

    @classmethod
    def joined(cls, parts: Sequence["Losses"]) -> "Losses":
        """The same figures over several stretches of steps: the loss by tokens, the penalty by steps."""
        steps, tokens = sum(part.steps for part in parts), sum(part.tokens for part in parts)
        loss = sum(part.loss * part.tokens for part in parts) / tokens
        return cls(steps, tokens, loss, sum(part.penalty * part.steps for part in parts) / steps)


@dataclass(frozen=True)
class LocalResult:
    """One local training: `Losses` over all of it, the rows really used, and `curve`, the losses of each epoch."""

    n_examples: int
    steps: int
    tokens: int
    loss: float
    penalty: float
    curve: tuple[Losses, ...]


def derive_seed(train_seed: int, server_round: int, client: int) -> int:
    """A fresh seed for one client in one round, the same in whatever order clients are trained.

    All three are integers ≥ 0. The seeds of neighbouring rounds and clients share nothing (a sum would).
    """
    return int(np.random.SeedSequence([train_seed, server_round, client]).generate_state(1)[0])


@contextlib.contextmanager
def calm(torch_threads: int | None = None) -> Iterator[None]:
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


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name; a tied one appears once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def proximal_penalty(parameters: Mapping[str, Tensor], anchor: Mapping[str, Tensor], mu: float) -> Tensor:
    """(μ/2)·‖w − w_t‖², the squared Euclidean norm over all parameters together (a scalar tensor).

    w: `parameters`; w_t: `anchor`, the weights that training starts from, under the same names.
    Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks" (FedProx), equation 2.
    """
    return mu / 2 * sum((parameters[name] - anchor[name]).square().sum() for name in parameters)


def usable(dataset: Sequence[Mapping]) -> list[Mapping]:
    """The rows of a dataset on which at least one token is predicted (the first token of a row never is)."""
    rows = (dataset[index] for index in range(len(dataset)))
    return [row for row in rows if any(label != IGNORED for label in row["labels"][1:])]


class _Epochs(TrainerCallback):
    """Gathers what the steps report and closes one `Losses` at the end of each epoch."""

    def __init__(self, on_epoch: Callable[[Losses], None] | None):
        self.on_epoch = on_epoch
        self.curve: list[Losses] = []
        self.steps: list[Losses] = []

    def add(self, tokens: int, loss: float, penalty: float) -> None:
        if not math.isfinite(loss + penalty):
            step = sum(epoch.steps for epoch in self.curve) + len(self.steps) + 1
            raise TrainingError(
                f"step {step} (epoch {len(self.curve) + 1}): the loss is {loss}, the penalty {penalty}; both must be "
                "finite. Nothing of this training is kept. Lower learning_rate, or proximal_mu if it is large."
            )
        self.steps.append(Losses(1, tokens, loss, penalty))

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        self.curve.append(Losses.joined(self.steps))
        self.steps.clear()
        if self.on_epoch:
            self.on_epoch(self.curve[-1])


class _LocalTrainer(Trainer):
    """transformers' Trainer with the proximal term in the loss, and the two parts of the loss reported apart."""

    def __init__(self, *, epochs: _Epochs, proximal_mu: float, **kwargs):
        super().__init__(callbacks=[epochs], **kwargs)
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = False  # the mean over a batch's own tokens, in training as in evaluation
        self.epochs = epochs
        self.proximal_mu = proximal_mu
        self.parameters = trained(self.model)
        # Cloned now, while the model still holds the weights it was given: an alias would move with them.
        self.anchor = {name: p.detach().clone() for name, p in self.parameters.items()} if proximal_mu else {}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, use_cache=False)
        total, penalty = outputs.loss, 0.0
        if self.proximal_mu:
            term = proximal_penalty(self.parameters, self.anchor, self.proximal_mu)
            total, penalty = total + term, term.item()
        self.epochs.add(int((inputs["labels"][:, 1:] != IGNORED).sum()), outputs.loss.item(), penalty)
        return (total, outputs) if return_outputs else total

    def release(self) -> None:
        """Drop what is as large as the model. A Trainer is part of reference cycles and would keep it for a while."""
        self.model.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self.anchor.clear()


def _arguments(model, config, epochs: int, seed: int, folder: str) -> TrainingArguments:
    """The Trainer's settings: what `config` says, a constant learning rate, and nothing written or shown."""
    on_cpu = model.device.type == "cpu"
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        seed=seed,
        data_seed=seed,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        # The Trainer writes this into the model's config, and so into every checkpoint: keep what is there.
        use_cache=getattr(model.config, "use_cache", True),
        remove_unused_columns=False,
        logging_nan_inf_filter=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one device: more would be wrapped and change the batch size
    return arguments


def train_locally(
    model,
    dataset: Sequence[Mapping],
    *,
    config,
    epochs: int,
    seed: int,
    proximal_mu: float = 0.0,
    on_epoch: Callable[[Losses], None] | None = None,
) -> LocalResult:
    """Train a model on a dataset for some epochs, in place, on the device where it is; it is left in eval mode.

    AdamW from fresh moments, constant learning rate, gradients clipped to norm 1, every row once an epoch in an
    order drawn from `seed` alone. With `proximal_mu` > 0 the loss gains (μ/2)·‖w − w_t‖² over the trained
    parameters, w_t being the weights at the start of this call (FedProx, Li et al. 2020, algorithm 2).

    dataset: rows with `input_ids` and `labels` (lists of token ids; −100 = not predicted).
    config: learning_rate, batch_size (rows), weight_decay, torch_threads, as in TrainConfig.
    seed: 0 … 2³² − 1; it also seeds Python, numpy and torch (dropout), as every Trainer does.
    on_epoch: called with the `Losses` of each epoch as it ends; the model then has that epoch's weights.
    Raises TrainingError when no row can be used, nothing can be trained, or a loss is not finite (with its step).
    """
    rows = usable(dataset)
    if not rows:
        raise TrainingError(f"none of the {len(dataset)} rows has a token to predict. Raise max_tokens, or add rows.")
    if not trained(model):
        raise TrainingError("the model has no parameter to train: all are frozen. Unfreeze some before training.")
    gathered = _Epochs(on_epoch)
    with calm(config.torch_threads), _older_objects_set_aside(), tempfile.TemporaryDirectory() as folder:
        trainer = _LocalTrainer(
            model=model,
            args=_arguments(model, config, epochs, seed, folder),
            data_collator=pad_batch,
            train_dataset=rows,
            epochs=gathered,
            proximal_mu=proximal_mu,
        )
        trainer.train()
        trainer.release()
    model.eval()
    total = Losses.joined(gathered.curve)
    return LocalResult(len(rows), total.steps, total.tokens, total.loss, total.penalty, tuple(gathered.curve))


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
        predicted = int((batch["labels"][:, 1:] != IGNORED).sum())
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        total += model(**batch, use_cache=False).loss.item() * predicted
        tokens += predicted
    model.train(was_training)
    return (total / tokens if tokens else math.nan), tokens
