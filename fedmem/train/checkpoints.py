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
    """The folder of the rounds of the model that `client` (0 … L − 1, or POOLED) takes part in."""
    return Path(checkpoints) / f"client-{client}" if algorithm == "local" else Path(checkpoints)


def checkpoint_folder(checkpoints: Path, algorithm: str, server_round: int, client: int = POOLED) -> Path:
    """The folder of the model that client `client` has after a round; FileNotFoundError if it is not there."""
    folder = part_folder(checkpoints, algorithm, client) / f"round-{server_round}"
    if not folder.is_dir():
        known = sorted(p.name for p in folder.parent.glob("round-*"))
        raise FileNotFoundError(f"there is no {folder}; there are: {', '.join(known) or 'none'}")
    return folder


def by_model(
    checkpoints: Path, algorithm: str, server_round: int, clients: Iterable[int]
) -> list[tuple[Path, list[int]]]:
    """The models of one round, each with the clients whose it is: one for all clients, or under "local" one each.

    clients: ids, in any order and any number of times each; they come in ascending order.
    """
    groups: dict[Path, list[int]] = {}
    for client in sorted({int(client) for client in clients}):
        groups.setdefault(checkpoint_folder(checkpoints, algorithm, server_round, client), []).append(client)
    return list(groups.items())


class FromRound(strategies.Strategy):
    """A strategy that goes on after `done` rounds: what Flower's loop counts from 1 is done + 1, done + 2, …"""

    def __init__(self, strategy: strategies.Strategy, done: int):
        self.strategy, self.done = strategy, done

    def configure_train(self, server_round, arrays, config, grid):
        return self.strategy.configure_train(self.done + server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        return self.strategy.aggregate_train(self.done + server_round, replies)

    def configure_evaluate(self, server_round, arrays, config, grid):
        return self.strategy.configure_evaluate(self.done + server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round, replies):
        return self.strategy.aggregate_evaluate(self.done + server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()


def _remembered(strategy) -> dict[str, object]:
    """The attributes that hold arrays: moments, momentum, current weights."""
    held = {}
    for name, value in vars(strategy).items():
        items = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
        if not name.startswith("_") and items and all(isinstance(item, np.ndarray | Array) for item in items):
            held[name] = value
    return held


def _innermost(strategy):
    while hasattr(strategy, "strategy"):
        strategy = strategy.strategy
    return strategy


def state_of(strategy) -> dict[str, np.ndarray]:
    """All arrays that a strategy remembers, {"<attribute>/<kind>/<place>/<key>": array}; empty for a plain average.

    The place is there because files of arrays keep no order, and some strategies pair arrays by theirs.
    """
    arrays = {}
    for name, value in _remembered(_innermost(strategy)).items():
        kind = "list" if isinstance(value, list) else "record" if isinstance(value, ArrayRecord) else "dict"
        items = enumerate(value) if kind == "list" else value.items()
        for place, (key, array) in enumerate(items):
            arrays[f"{name}/{kind}/{place}/{key}"] = array.numpy() if kind == "record" else array
    return arrays


def restore_state(strategy, arrays: Mapping[str, np.ndarray]) -> None:
    """Give a new strategy what `state_of` took from another one of the same kind."""
    held: dict[tuple[str, str], list[tuple[int, str, np.ndarray]]] = {}
    for name, array in arrays.items():
        attribute, kind, place, key = name.split("/", 3)
        held.setdefault((attribute, kind), []).append((int(place), key, array))
    for (attribute, kind), items in held.items():
        values = {key: array for _, key, array in sorted(items, key=lambda item: item[0])}
        if kind == "record":
            values = ArrayRecord({key: Array(array) for key, array in values.items()})
        setattr(_innermost(strategy), attribute, list(values.values()) if kind == "list" else values)


class Checkpoints:
    """The global model of every round as a folder `round-0` … `round-N` that `from_pretrained` loads.

    folder: where they go, made at need. model, tokenizer: what is saved (safetensors, in the model's dtype; of a model
    with adapters, the adapters). test_sets: {client: rows} on which each global model's loss is measured; may be
    empty. history: takes the losses, and knows which rounds an interrupted run has made.
    A folder appears whole or not at all, and a model that is not finite is never saved.
    """

    def __init__(
        self, folder: str | Path, model, tokenizer, test_sets: Mapping[int, Sequence], config, history: History
    ):
        self.folder = Path(folder)
        self.model, self.tokenizer, self.test_sets = model, tokenizer, test_sets
        self.config, self.history = config, history

    def path(self, server_round: int) -> Path:
        """The folder of one round's model."""
        return self.folder / f"round-{server_round}"

    @property
    def done(self) -> int | None:
        """The last round that an interrupted run has made and saved whole; None where it made none."""
        done = self.history.rounds.get(self.folder.name)
        return done if done is not None and self.path(done).is_dir() else None

    @property
    def adapted(self) -> bool:
        """Whether it is adapters that are trained and saved."""
        return hasattr(self.model, "peft_config")

    def evaluate_fn(self, server_round: int, arrays: ArrayRecord, state: Mapping | None = None) -> MetricRecord:
        """What Flower's `Strategy.start` calls for rounds 0 … N: load the global weights, save, measure.

        state: arrays that the strategy must remember if the run is interrupted after this round.
        """
        set_arrays(self.model, arrays)
        losses = self.save(server_round, state)
        return MetricRecord({f"test_loss_{client}": loss for client, loss in losses.items()})

    def save(self, server_round: int, state: Mapping | None = None) -> dict[int, float]:
        """Save the model as it is now as this round's checkpoint; return the test loss by client.

        Raises FederatedError if the model is not finite or cannot be written; earlier rounds stay as they are.
        """
        begun = time.perf_counter()
        wrong = [name for name, p in trained_parameters(self.model).items() if not torch.isfinite(p).all()]
        if wrong:
            raise FederatedError(f"round {server_round}: weights not finite: {', '.join(wrong[:5])}. Nothing is saved.")
        with quiet_libraries(self.config.torch_threads):
            self._write(self.path(server_round))
            losses = {client: self._measure(server_round, client) for client in sorted(self.test_sets)}
        self.history.add_seconds(server_round, POOLED, "checkpoint", time.perf_counter() - begun)
        try:
            self.history.keep(self.folder.name, server_round, state)
        except Exception as error:
            raise self._unwritten(self.path(server_round), error) from error
        return losses

    def resume(self, server_round: int) -> None:
        """Load the last round of an interrupted run.

        Where it cannot be read (after a power loss), that run is forgotten, and FederatedError says so: the next one
        begins anew.
        """
        try:
            self.load(server_round)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            self.history.forget()
            raise FederatedError(
                f"round {server_round} of the interrupted training cannot be read: {self.path(server_round)}: {error}\n"
                "It is forgotten now: run again, and the training begins anew."
            ) from error

    def load(self, server_round: int) -> None:
        """Put a round's saved weights into the model, bit for bit as they were saved."""
        folder = self.path(server_round)
        with quiet_libraries():
            if self.adapted:
                from peft import set_peft_model_state_dict

                from fedmem.models.adapters import WEIGHTS_FILE

                set_peft_model_state_dict(self.model, load_file(folder / WEIGHTS_FILE))
                return
            saved = dict(type(self.model).from_pretrained(folder, dtype=torch.float32).named_parameters())
        with torch.no_grad():
            for name, parameter in trained_parameters(self.model).items():
                parameter.copy_(saved[name])

    def _write(self, target: Path) -> None:
        partial = target.with_name(f".{target.name}.partial")
        for old in (partial, target):
            shutil.rmtree(old, ignore_errors=True)
        try:
            if self.adapted:
                from fedmem.models import adapters  # peft takes a second to import, which full models do without

                adapters.save(self.model, partial)
            else:
                self.model.save_pretrained(partial)
            self.tokenizer.save_pretrained(partial)
            os.replace(partial, target)
        except Exception as error:  # safetensors and tokenizers raise their own for a full disk
            shutil.rmtree(partial, ignore_errors=True)
            raise self._unwritten(target, error) from error

    def _unwritten(self, target: Path, error: Exception) -> FederatedError:
        return FederatedError(
            f"{target.name.replace('-', ' ')}: its checkpoint could not be written to {target}: "
            f"{type(error).__name__}: {error}\nEarlier rounds are whole. Make room there (a round takes as much as "
            "round-0) or allow writing, and run again: it goes on after the last whole round."
        )

    def _measure(self, server_round: int, client: int) -> float:
        rows = self.test_sets[client]
        loss, tokens = evaluate_loss(self.model, rows, self.config.batch_size)
        if tokens:
            self.history.add(server_round, client, {"test_loss": loss}, len(rows), tokens)
        return loss
