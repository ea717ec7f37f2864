"""Going on where an interrupted run stopped: a strategy that counts rounds on, and what it remembers between rounds.

Moments, momentum and the like are arrays in a strategy's attributes; they are taken out and put back by name, whatever
the strategy is.
"""

from collections.abc import Mapping

import numpy as np

from fedmem.flower_grid import Array, ArrayRecord, strategies

__all__ = ["FromRound", "restore_state", "state_of"]


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
