"""The global model of every round on disk, where it lies, and what is needed to go on from it.

    checkpoints/round-0 … round-N              one model for all clients
    checkpoints/client-<j>/round-0 … round-N   algorithm "local": each client's own

A checkpoint is saved whole or not at all, measured, and taken up again after an interruption. What a strategy remembers
between rounds (moments, momentum) are arrays in its attributes; they are taken out and put back by name, whatever the
strategy is. This module does not depend on where the weights come from.
"""

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedmem.config.vocabulary import POOLED
from fedmem.train.history import History
from fedmem.train.in_process_grid import Array, ArrayRecord, FederatedError, MetricRecord, strategies
from fedmem.train.local_trainer import trained_parameters
from fedmem.train.local_training import evaluate_loss, quiet_libraries
from fedmem.train.weights import set_arrays


def part_folder(checkpoints: Path, algorithm: str, client: int) -> Path:
    """The folder with the rounds of a client's model.

    checkpoints: the checkpoints folder of a train stage. algorithm: that of the training; under "local" each client has
    a folder of its own. client: 0 … L − 1, or POOLED.
    """
    return Path(checkpoints) / f"client-{client}" if algorithm == "local" else Path(checkpoints)


def checkpoint_folder(checkpoints: Path, algorithm: str, server_round: int, client: int = POOLED) -> Path:
    """The folder of a client's model after a round.

    checkpoints, algorithm, client: as for `part_folder`.
    server_round: 0 (before training) … N.
    Raises FileNotFoundError, which lists the existing rounds, if there is no such folder.
    """
    folder = part_folder(checkpoints, algorithm, client) / f"round-{server_round}"
    if not folder.is_dir():
        known = sorted(p.name for p in folder.parent.glob("round-*"))
        raise FileNotFoundError(f"there is no {folder}; there are: {', '.join(known) or 'none'}")
    return folder


def by_model(
    checkpoints: Path, algorithm: str, server_round: int, clients: Iterable[int]
) -> list[tuple[Path, list[int]]]:
    """The models of one round as (folder, clients): one model for all clients, or under "local" one model each.

    checkpoints, algorithm, server_round: as for `checkpoint_folder`.
    clients: ids 0 … L − 1 in any order; repeated ids count once. The returned ids are in ascending order.
    Raises FileNotFoundError if a folder is missing.
    """
    # int(): ids from a table are numpy integers, and the folder's name and the result need Python's
    groups: dict[Path, list[int]] = {}
    for client in sorted({int(client) for client in clients}):
        groups.setdefault(checkpoint_folder(checkpoints, algorithm, server_round, client), []).append(client)
    return list(groups.items())


class FromRound(strategies.Strategy):
    """A strategy that continues after `done` rounds: round 1 of Flower's loop becomes done + 1, and so on."""

    def __init__(self, strategy: strategies.Strategy, done: int):
        self.strategy, self.done = strategy, done

    def configure_train(self, server_round, arrays, config, grid):
        """Call the inner strategy with the round's true number.

        server_round: the round in Flower's loop, from 1. arrays: the global weights. config: what clients are sent.
        grid: the Grid that messages go through.
        """
        return self.strategy.configure_train(self.done + server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        return self.strategy.aggregate_train(self.done + server_round, replies)

    def configure_evaluate(self, server_round, arrays, config, grid):
        """Call the inner strategy with the round's true number; parameters as in `configure_train`.

        server_round, arrays, config, grid: passed on, the first one shifted by `done`.
        """
        return self.strategy.configure_evaluate(self.done + server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round, replies):
        return self.strategy.aggregate_evaluate(self.done + server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()


def _innermost(strategy):
    # wrappers such as FromRound hold no state of their own; the strategy inside them does
    while hasattr(strategy, "strategy"):
        strategy = strategy.strategy
    return strategy


def state_of(strategy) -> dict[str, np.ndarray]:
    """Return all arrays in a strategy's state, {"<attribute>/<kind>/<place>/<key>": array}; empty for a plain average.

    The name includes the place because files of arrays keep no order, and some strategies pair arrays by their order.
    """
    arrays = {}
    for name, value in vars(_innermost(strategy)).items():
        kind = "list" if isinstance(value, list) else "record" if isinstance(value, ArrayRecord) else "dict"
        items = list(value.items() if isinstance(value, Mapping) else enumerate(value) if kind == "list" else ())
        # by type, not by a list of names: Flower's strategies keep moments and momentum in attributes of various names
        if not name.startswith("_") and all(isinstance(item, np.ndarray | Array) for _, item in items):
            for place, (key, array) in enumerate(items):
                arrays[f"{name}/{kind}/{place}/{key}"] = array.numpy() if kind == "record" else array
    return arrays


def restore_state(strategy, arrays: Mapping[str, np.ndarray]) -> None:
    """Set the state of a new strategy to what `state_of` returned for another one of the same kind.

    strategy: the new one, possibly wrapped. arrays: {"<attribute>/<kind>/<place>/<key>": array}.
    """
    held: dict[tuple[str, str], list[tuple[int, str, np.ndarray]]] = {}
    for name, array in arrays.items():
        attribute, kind, place, key = name.split("/", 3)  # at most 3 splits: a key may contain a slash
        held.setdefault((attribute, kind), []).append((int(place), key, array))
    for (attribute, kind), items in held.items():
        values = {key: array for _, key, array in sorted(items, key=lambda item: item[0])}
        if kind == "record":
            # Flower's own type, which the strategy reads its current weights from
            values = ArrayRecord({key: Array(array) for key, array in values.items()})
        setattr(_innermost(strategy), attribute, list(values.values()) if kind == "list" else values)


class Checkpoints:
    """The global model of every round as a folder `round-0` … `round-N` that `from_pretrained` loads.

    folder: where the checkpoints are written; created when needed.
    model, tokenizer: what is saved (safetensors, in the model's dtype); of a model with adapters, only the adapters.
    test_sets: {client: rows} on which the loss of each global model is measured; may be empty.
    config: a TrainConfig; reads torch_threads and batch_size.
    history: records the losses, and holds the rounds that an interrupted run has completed.
    A checkpoint folder appears only when it is complete. A model with non-finite weights is never saved.
    """

    def __init__(
        self, folder: str | Path, model, tokenizer, test_sets: Mapping[int, Sequence], config, history: History
    ):
        self.folder = Path(folder)
        self.model, self.tokenizer, self.test_sets = model, tokenizer, test_sets
        self.config, self.history = config, history

    def path(self, server_round: int) -> Path:
        """Return the folder of one round's model."""
        return self.folder / f"round-{server_round}"

    @property
    def done(self) -> int | None:
        """The last round that an interrupted run has completed and saved, or None."""
        # the history alone is not enough: the folder may have been deleted since
        done = self.history.rounds.get(self.folder.name)
        return done if done is not None and self.path(done).is_dir() else None

    @property
    def adapted(self) -> bool:
        """Whether only adapters are trained and saved."""
        return hasattr(self.model, "peft_config")

    def evaluate_fn(self, server_round: int, arrays: ArrayRecord, state: Mapping | None = None) -> MetricRecord:
        """Load the global weights, save them, measure the loss; Flower's `Strategy.start` calls it for rounds 0 … N.

        server_round: number of the round, 0 (before training) … N.
        arrays: the global weights after this round.
        state: arrays that the strategy needs if the run is interrupted after this round; None: it needs none.
        Returns the test loss of each client as test_loss_<client>, in nats per token. Raises FederatedError as `save`.
        """
        set_arrays(self.model, arrays)
        losses = self.save(server_round, state)
        return MetricRecord({f"test_loss_{client}": loss for client, loss in losses.items()})

    def save(self, server_round: int, state: Mapping | None = None) -> dict[int, float]:
        """Save the current model as this round's checkpoint; return the test loss by client, in nats per token.

        Raises FederatedError when a weight is not finite or the checkpoint cannot be written; earlier rounds stay.
        """
        begun = time.perf_counter()
        wrong = [name for name, p in trained_parameters(self.model).items() if not torch.isfinite(p).all()]
        if wrong:
            raise FederatedError(f"round {server_round}: weights not finite: {', '.join(wrong[:5])}. Nothing is saved.")
        with quiet_libraries(self.config.torch_threads):
            self._write(self.path(server_round))
            losses = {client: self._measure(server_round, client) for client in sorted(self.test_sets)}
        self.history.add_seconds(server_round, POOLED, "checkpoint", time.perf_counter() - begun)
        # only now that the checkpoint is complete: a resumed run loads the round that the history names
        try:
            self.history.keep(self.folder.name, server_round, state)
        except Exception as error:  # as in _write: the kind depends on the library that writes
            raise self._unwritten(self.path(server_round), error) from error
        return losses

    def resume(self, server_round: int) -> None:
        """Load the last round of an interrupted run.

        Raises FederatedError when it cannot be read (for example after a power loss). The interrupted run is forgotten
        then, so that the next run starts from the beginning.
        """
        try:
            self.load(server_round)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            self.history.forget()
            raise FederatedError(
                f"round {server_round} of the interrupted training cannot be read: {self.path(server_round)}: {error}\n"
                "It is forgotten now: run again, and the training starts from the beginning."
            ) from error

    def load(self, server_round: int) -> None:
        """Load a round's saved weights into the model, bit for bit as they were saved."""
        folder = self.path(server_round)
        with quiet_libraries():
            if self.adapted:
                from peft import set_peft_model_state_dict

                from fedmem.models.adapters import WEIGHTS_FILE

                set_peft_model_state_dict(self.model, load_file(folder / WEIGHTS_FILE))
                return
            # not load_file: save_pretrained splits the weights of large models into several files
            saved = dict(type(self.model).from_pretrained(folder, dtype=torch.float32).named_parameters())
        with torch.no_grad():
            for name, parameter in trained_parameters(self.model).items():
                parameter.copy_(saved[name])

    def _write(self, target: Path) -> None:
        # written under a hidden name and renamed: a run that is killed here leaves no half checkpoint
        partial = target.with_name(f".{target.name}.partial")
        for old in (partial, target):
            shutil.rmtree(old, ignore_errors=True)
        try:
            if self.adapted:
                from fedmem.models import adapters  # peft takes a second to import, and full models do not need it

                adapters.save(self.model, partial)
            else:
                self.model.save_pretrained(partial)
            self.tokenizer.save_pretrained(partial)
            os.replace(partial, target)
        except Exception as error:  # safetensors and tokenizers have their own exceptions for a full disk
            shutil.rmtree(partial, ignore_errors=True)
            raise self._unwritten(target, error) from error

    def _unwritten(self, target: Path, error: Exception) -> FederatedError:
        return FederatedError(
            f"{target.name.replace('-', ' ')}: its checkpoint could not be written to {target}: "
            f"{type(error).__name__}: {error}\nEarlier rounds are complete. Make room there (a round takes as much as "
            "round-0) or allow writing, and run again: it continues after the last complete round."
        )

    def _measure(self, server_round: int, client: int) -> float:
        rows = self.test_sets[client]
        loss, tokens = evaluate_loss(self.model, rows, self.config.batch_size)
        if tokens:  # without a predicted token the loss is NaN, and the history gets no row
            self.history.add(server_round, client, {"test_loss": loss}, len(rows), tokens)
        return loss
