"""Run as a script: trains as notebook 2 does and kills itself where it is told to; imported: the same without a kill.

    python killed_training.py '<JSON: {"train": [parameters, …], "kill": {"part": …, "round": …, "when": …}}>'

Every training runs in a process of its own, forked before torch has computed anything.
"""

import json
import os
import signal
import sys

from fedmem import adapters, federated, models, runs
from fedmem.config import TrainConfig


def train(parameters: dict, kill: dict | None = None) -> runs.Stage:
    """Notebook 2 from `runs.begin` to `publish`."""
    dealt = runs.find("partition")
    work = runs.begin(TrainConfig(**parameters), dealt)
    config, history = work.config, federated.History(work.progress)
    if kill:
        _die(history, kill)
    rows = dealt.table("rows")
    model, tokenizer = models.load(config.model, "cpu")
    if config.finetuning == "lora":
        model = adapters.add_adapters(model, config)
    train_sets = federated.client_datasets(rows, tokenizer, config)
    test_sets = federated.client_datasets(rows, tokenizer, config, split="test")
    start = federated.get_arrays(model)
    for clients in federated.federations(train_sets, config.algorithm):
        folder = federated.part_folder(work.path("checkpoints"), config.algorithm, min(clients))
        tested = test_sets if config.algorithm != "local" else {client: test_sets[client] for client in clients}
        checkpoints = federated.Checkpoints(folder, model, tokenizer, tested, config, history)
        strategy = federated.make_strategy(config, clients, history)
        client_app = federated.make_client_app(model, clients, config)
        server_app = federated.make_server_app(config, strategy, start, checkpoints)
        federated.InProcessGrid(client_app, clients).serve(server_app)
    work.save_table("curves", history.curves())
    return work.publish()


def code_digest(stage: str) -> str:
    """Stands for the code's digest: somebody may edit the code while these tests run."""
    return "the same code"


def _die(history: federated.History, kill: dict) -> None:
    """Have SIGKILL sent to this process when a round of a part is kept: just before that, or just after."""
    keep = history.keep

    def keep_and_die(part, server_round, arrays=None):
        here = part == kill["part"] and server_round == kill["round"]
        if not (here and kill["when"] == "before"):
            keep(part, server_round, arrays)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)

    history.keep = keep_and_die


if __name__ == "__main__":
    runs.code_digest = code_digest
    for parameters, kill in json.loads(sys.argv[1]):
        if (child := os.fork()) == 0:
            train(parameters, kill)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else f"ended with {status}", flush=True)
