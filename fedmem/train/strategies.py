"""How a round's weights are made of the clients': Flower's strategies, each made to demand every client's answer.

`fedavg`, `fedprox`, `central` and `local` average as the answers come in, so that two models and one answer are held
at most; every other strategy of Flower is taken by the name of its class and gets all answers at once. `describe`
writes
an algorithm's formulas in plain signs beside the settings that occur in them. This module does not depend on how
clients train, nor on what is done with the weights.
"""

import inspect
from collections.abc import Iterable, Iterator

import numpy as np

from fedmem.config.parameter import closest
from fedmem.config.yaml_files import read
from fedmem.machine.paths import data_file
from fedmem.train.history import History
from fedmem.train.in_process_grid import Array, ArrayRecord, FederatedError, Message, MetricRecord, named, strategies
from fedmem.train.local_training import derive_seed, quiet_libraries
from fedmem.train.weights import drift, norm

CLIPPING = "clipping and noise, no formal guarantee"

OWN = {"fedavg": "FedAvg", "fedprox": "FedProx", "central": "FedAvg", "local": "FedAvg"}

SET_HERE = {  # arguments of strategies that fedmem sets itself, or that YAML cannot express
    "fraction_train", "fraction_evaluate", "min_train_nodes", "min_evaluate_nodes", "min_available_nodes",
    "weighted_by_key", "arrayrecord_key", "configrecord_key", "train_metrics_aggr_fn", "evaluate_metrics_aggr_fn",
    "proximal_mu", "train_loss_key", "selection_rule",
}  # fmt: skip

RATES = ("eta", "eta_l", "server_learning_rate", "client_learning_rate")

ENOUGH = {"Krum": 2, "MultiKrum": 2, "Bulyan": 4}  # least number of clients: this factor · num_malicious_nodes + 3

NOISE = 2**32 - 1  # takes the place of a client's id in a seed; no client has this id


class _Demanding:
    """Mixin before a Flower strategy: every client must answer every round, with weights that can be averaged.

    Flower itself averages the answers that arrived, and keeps the old weights when there are none. Each answer is
    checked before the strategy's own aggregation uses it.
    """

    clients: tuple[int, ...]
    history: History
    update_clip: float | None
    _sent: ArrayRecord

    def configure_train(self, server_round, arrays, config, grid):
        """Keep the arrays that are sent, for the checks of the answers, then configure as Flower does.

        server_round: the round, from 1. arrays: the global model's weights. config: settings sent to every client.
        grid: the connection to the clients.
        """
        self._sent = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        """Check all replies and aggregate them; raises FederatedError for a bad reply or too few clients."""
        # a network returns a list in any order, and floating-point sums depend on it; a generator is in client order
        if isinstance(replies, list):
            replies = sorted(replies, key=_client)
        arrays, metrics = super().aggregate_train(server_round, self.checked(server_round, replies))
        if arrays is None:
            name = next(base.__name__ for base in type(self).__mro__ if base.__module__.startswith("flwr."))
            raise FederatedError(
                f"round {server_round}: {name} computed no weights from {len(self.clients)} clients' answers, which is "
                "too few for its strategy_options: use more clients, or a smaller num_malicious_nodes."
            )
        return self._as_sent(arrays), metrics

    def checked(self, server_round: int, replies: Iterable[Message]) -> Iterator[Message]:
        """Yield each reply once it is checked and recorded in the history; raises FederatedError for a bad reply.

        server_round: the round, from 1. replies: the clients' answers. Finally, every client must have answered once.
        """
        answered = []
        for reply in replies:
            self._check(server_round, reply)
            self._note(server_round, reply.content["metrics"])
            answered.append(reply.content["metrics"]["client"])
            yield reply
            del reply  # otherwise the generator would keep one more answer in memory
        if sorted(answered) != sorted(self.clients):
            raise FederatedError(
                f"round {server_round}: {len(answered)} of {len(self.clients)} clients answered ({answered}); expected "
                "each of them once. See the logs of the missing clients."
            )

    def _check(self, server_round: int, reply: Message) -> None:
        _check_answered(server_round, reply)
        metrics, arrays = reply.content["metrics"], reply.content["arrays"]
        where = f"{named(metrics['client'])}, round {server_round}"
        if metrics["num-examples"] <= 0:
            raise FederatedError(f"{where}: trained on 0 examples, so its weight in the average is 0. Give it rows.")
        shapes = ({name: tuple(array.shape) for name, array in record.items()} for record in (arrays, self._sent))
        if next(shapes) != next(shapes):
            raise FederatedError(
                f"{where}: its arrays are not those that it was sent; expected the same names and shapes."
            )
        wrong = [name for name, value in metrics.items() if not np.isfinite(value)]
        wrong += [name for name, array in arrays.items() if not np.isfinite(array.numpy()).all()]
        if wrong:
            raise FederatedError(f"{where}: not finite: {', '.join(wrong[:5])}. Lower learning_rate or proximal_mu.")
        # training without effect raises no error on the client
        if metrics["drift"] == 0:
            raise FederatedError(f"{where}: its weights did not change at all. Raise learning_rate or local_epochs.")
        if self.update_clip is not None:
            self._check_clipped(where, arrays)

    def _check_clipped(self, where: str, arrays: ArrayRecord) -> None:
        moved = drift(arrays, self._sent)
        # slack for fp32 rounding: of the norm that the client scales by, and of w_t + update
        if moved > self.update_clip * 1.001 + norm(self._sent) * 2**-23:
            raise FederatedError(
                f"{where}: its update has norm {moved:.6g}, more than update_clip = {self.update_clip:g}: it was not "
                "clipped. Add the mod `fedmem.train.in_process_grid.clipping` to the train function of its app "
                f"(@app.train(mods=[clipping])); nothing was averaged. ({CLIPPING})"
            )

    def _note(self, server_round: int, metrics: MetricRecord) -> None:
        client, values = metrics["client"], {name: metrics[name] for name in ("train_loss", "penalty", "drift")}
        self.history.add(server_round, client, values, metrics["num-examples"], metrics["tokens"], metrics["steps"])
        self.history.add_seconds(server_round, client, "train", metrics["seconds"])

    def _as_sent(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays in the types that were sent: some strategies compute in fp64, a checkpoint is fp32."""
        for name, array in arrays.items():
            if array.dtype != self._sent[name].dtype:
                arrays[name] = Array(array.numpy().astype(self._sent[name].dtype))
        return arrays


class _Streaming:
    """Running weighted mean: m ← m + (n_j / N)·(w_j − m), with N the number of examples so far, those of w_j included.

    Equal to Σ n_j w_j / Σ n_j (McMahan et al. 2017, algorithm 1) up to rounding; exact for a single client and for
    clients with equal weights. Only the mean and one answer are in memory.
    """

    def aggregate_train(self, server_round, replies):
        """Return the weighted mean of the replies' arrays, and no metrics: the history records those."""
        mean, total = {}, 0
        for reply in replies:
            examples, arrays = reply.content["metrics"]["num-examples"], reply.content["arrays"]
            total += examples
            for name in list(arrays):
                # popped and updated in place, so that no third copy of an array exists
                array = arrays.pop(name).numpy()
                if name in mean:
                    array -= mean[name]
                    array *= array.dtype.type(examples / total)
                    mean[name] += array
                else:
                    mean[name] = array
            del reply, arrays
        return ArrayRecord({name: Array(mean.pop(name)) for name in list(mean)}), None


class _ClippedAndNoised(strategies.DifferentialPrivacyClientSideFixedClipping):
    """Flower's wrapper for client-side fixed clipping, with checks before it and a seed for its noise.

    Clients clip their updates to the norm that they receive; the mean gets Gaussian noise of standard deviation
    update_noise · update_clip / n_clients in every coordinate (McMahan et al. 2018). Clipping and noise, no formal
    guarantee: the mean is weighted by examples, no privacy budget is accounted, and the test losses are published
    without noise of their own. The noise depends only on (train_seed, round), so a run is reproducible. All answers are
    in memory at once.
    """

    train_seed: int

    def aggregate_train(self, server_round, replies):
        """Aggregate the replies and add seeded noise; raises FederatedError when a client failed."""
        replies = sorted(replies, key=_client)
        for reply in replies:  # Flower's wrapper skips a round with a failed client and continues
            _check_answered(server_round, reply)
        # Flower draws the noise from numpy's global generator: seed it here, restore it for everyone else
        before = np.random.get_state()
        np.random.seed(derive_seed(self.train_seed, server_round, NOISE))
        try:
            return super().aggregate_train(server_round, replies)
        finally:
            np.random.set_state(before)


def strategy_names() -> list[str]:
    """Return the class names of Flower's strategies that average weights: FedAvg and its subclasses.

    Those for gradient-boosted trees (Xgb) are excluded: they aggregate trees, not arrays.
    """
    classes = {name: found for name, found in vars(strategies).items() if inspect.isclass(found)}
    averaging = {name for name, found in classes.items() if issubclass(found, strategies.FedAvg) and "Xgb" not in name}
    return sorted(averaging & set(strategies.__all__))


def options_of(algorithm: str) -> dict[str, inspect.Parameter]:
    """Return the valid `strategy_options` of an algorithm: {name: parameter of Flower's class, with type and default}.

    algorithm: fedavg, fedprox, central, local, or one of `strategy_names`. Raises FederatedError for another one.
    """
    parameters = inspect.signature(_flower_class(algorithm)).parameters
    return {name: parameter for name, parameter in parameters.items() if name not in SET_HERE}


def make_strategy(config, clients: int | Iterable[int], history: History) -> strategies.Strategy:
    """Return Flower's strategy for a training configuration.

    central and local average over the single client that they train at a time.
    config: the train stage's parameters, of which algorithm, strategy_options, proximal_mu, update_clip, update_noise
        and train_seed are used.
    clients: the clients' ids, or their number L ≥ 1 for the ids 0 … L − 1; all of them train in every round.
    history: receives each client's losses, drift, counts and seconds.
    Raises FederatedError, with the expected options, for options that the strategy does not have or refuses. The
    strategy raises it when a client fails, is missing, has no examples, sends values that are not finite, did not
    change its weights, or did not clip its update.
    """
    clients, base = tuple(range(clients) if isinstance(clients, int) else clients), _flower_class(config.algorithm)
    everyone = {"min_train_nodes": len(clients), "min_available_nodes": len(clients)}
    no_evaluation = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}  # the checkpoints measure the global model
    options = _checked_options(config)
    _check_enough(config, len(clients))
    if config.algorithm == "fedprox":
        options["proximal_mu"] = config.proximal_mu
    # the order of the calls: checks, then the running mean, then Flower's class
    bases = (_Demanding, _Streaming, base) if config.algorithm in OWN else (_Demanding, base)
    demanding = type(f"Demanding{base.__name__}", bases, {"__doc__": f"Flower's {base.__name__}, all clients."})
    with quiet_libraries():
        try:
            strategy = demanding(**everyone, **no_evaluation, **options)
        except ValueError as error:
            raise FederatedError(f"strategy_options of {config.algorithm}: {error}") from error
    clip = config.update_clip if config.federates else None
    strategy.clients, strategy.history, strategy.update_clip = clients, history, clip
    if clip is None:
        return strategy
    wrapped = _ClippedAndNoised(strategy, config.update_noise, clip, len(clients))
    wrapped.train_seed = config.train_seed
    return wrapped


def _flower_class(algorithm: str) -> type:
    name = OWN.get(algorithm, algorithm)
    if name not in strategy_names():
        allowed = ", ".join([*OWN, *strategy_names()])
        raise FederatedError(f"algorithm {algorithm!r} has no strategy; expected one of {allowed}.")
    return getattr(strategies, name)


def _checked_options(config) -> dict:
    if not config.federates:
        return {}
    allowed, given = options_of(config.algorithm), dict(config.strategy_options)
    described = ", ".join(
        f"{name} ({'required' if p.default is p.empty else f'default {p.default}'})" for name, p in allowed.items()
    )
    for name, value in given.items():
        if name not in allowed:
            raise FederatedError(
                f"strategy_options: {config.algorithm} has no option {name!r}{closest(name, allowed)}; "
                f"expected options: {described or 'none'}"
            )
        kind = allowed[name].annotation
        # bool is a subclass of int, but true is not a number in YAML
        if kind in (int, float) and (isinstance(value, bool | str) or (kind is int and not isinstance(value, int))):
            wanted = "a whole number" if kind is int else "a number"
            raise FederatedError(f"strategy_options: {name}: got {value!r}; expected {wanted}; options: {described}")
        if name in RATES and value <= 0:
            raise FederatedError(f"strategy_options: {name}: got {value!r}; expected a number > 0")
    if missing := [name for name, p in allowed.items() if p.default is p.empty and name not in given]:
        raise FederatedError(f"strategy_options: {config.algorithm} needs {', '.join(missing)}; options: {described}")
    return given


def _check_enough(config, n_clients: int) -> None:
    """Check the number of clients: n > 2f + 2 for Krum (Blanchard et al. 2017), n ≥ 4f + 3 for Bulyan.

    The latter is from El Mhamdi et al. 2018; f is num_malicious_nodes. Raises FederatedError.
    """
    if config.algorithm not in ENOUGH:
        return
    malicious = config.strategy_options.get("num_malicious_nodes", 0)
    needed = ENOUGH[config.algorithm] * malicious + 3
    if malicious < 0:
        raise FederatedError(f"strategy_options: num_malicious_nodes: got {malicious}; expected a whole number ≥ 0")
    if n_clients < needed:
        raise FederatedError(
            f"strategy_options: {config.algorithm} with num_malicious_nodes = {malicious} needs {needed} "
            f"clients ({ENOUGH[config.algorithm]} · num_malicious_nodes + 3), and there are {n_clients}: use more "
            "clients, or a smaller num_malicious_nodes"
        )


def _check_answered(server_round: int, reply: Message) -> None:
    if reply.has_error():
        raise FederatedError(
            f"{named(reply.metadata.src_node_id)}, round {server_round}: failed with code {reply.error.code}: "
            f"{reply.error.reason}"
        )


def _client(reply: Message) -> int:
    """Return the sort key of a reply: its client id; a failed reply, which has none, is first."""
    return -2 if reply.has_error() else reply.content["metrics"]["client"]


FORMULAS = read(data_file("formulas.yaml"))


def describe(config) -> str:
    """Return Markdown with the formulas of `config.algorithm` as a quotation, and the values of their symbols.

    config: a TrainConfig. In round t, counted from 0, w_t are the weights that every client starts from, w_j the
    weights of client j after local training, and n_j the number of rows it used. Raises FederatedError when
    strategy_options contains an option that the algorithm does not have.
    """
    lines, noisy = list(FORMULAS[config.algorithm]), config.federates and config.update_clip is not None
    # clipping comes before the aggregation, which is the last line; noise comes after it
    if noisy:
        lines.insert(-1, f"w_j ← w_t + (w_j − w_t) · min(1, C ∕ ‖w_j − w_t‖)   ({CLIPPING})")
        lines.append(f"w_{{t+1}} ← w_{{t+1}} + N(0, σ²), σ = z · C ∕ L   ({CLIPPING})")
    settings = _settings(config)
    if noisy:
        settings += [f"C = update_clip = {config.update_clip:g}", f"z = update_noise = {config.update_noise:g}"]
    quoted = "\n>\n".join(f"> {line}" for line in lines)
    return f"**{config.algorithm}**\n\n{quoted}\n\n" + (f"with {', '.join(settings)}.\n" if settings else "")


def _settings(config) -> list[str]:
    if config.algorithm == "none":
        return []
    work = (config.local_steps, "local step") if config.local_steps else (config.local_epochs, "local epoch")
    settings = [f"{count} {what}{'s' * (count != 1)}" for count, what in ((config.rounds, "round"), work)]
    if config.algorithm == "fedprox":
        settings.append(f"μ = {config.proximal_mu:g}")
    # options that are not set take part in the formulas with the strategy's own defaults
    if config.federates:
        defaults = {name: p.default for name, p in options_of(config.algorithm).items() if p.default is not p.empty}
        settings += [f"{name} = {value}" for name, value in (defaults | config.strategy_options).items()]
    return settings
