"""Run as a script: trains as notebook 2 does and kills itself where it is told to; imported: the same without a kill.

    python killed_training.py '<JSON: {"train": [parameters, …], "kill": {"part": …, "round": …, "when": …}}>'

Every training runs in a process of its own, forked before torch has computed anything.
"""

import json
import os
import signal
import sys

from fedmem.config.stages import TrainConfig
from fedmem.models import adapters
from fedmem.models.loading import load_model
from fedmem.results import work as stage_work
from fedmem.results.stage import Stage, find_stage
from fedmem.results.work import begin_stage
from fedmem.train.checkpoints import Checkpoints, part_folder
from fedmem.train.federation import client_datasets, federations, make_client_app, make_server_app
from fedmem.train.history import History
from fedmem.train.in_process_grid import InProcessGrid
from fedmem.train.strategies import make_strategy
from fedmem.train.weights import get_arrays


def train(parameters: dict, kill: dict | None = None) -> Stage:
    """Notebook 2 from `work.begin_stage` to `publish`."""
    dealt = find_stage("partition")
    work = begin_stage(TrainConfig(**parameters), dealt)
    config, history = work.config, History(work.progress)
    if kill:
        _die(history, kill)
    rows = dealt.table("rows")
    model, tokenizer = load_model(config.model, "cpu")
    if config.finetuning == "lora":
        model = adapters.add_adapters(model, config)
    train_sets = client_datasets(rows, tokenizer, config)
    test_sets = client_datasets(rows, tokenizer, config, split="test")
    start = get_arrays(model)
    for clients in federations(train_sets, config.algorithm):
        folder = part_folder(work.path("checkpoints"), config.algorithm, min(clients))
        tested = test_sets if config.algorithm != "local" else {client: test_sets[client] for client in clients}
        checkpoints = Checkpoints(folder, model, tokenizer, tested, config, history)
        strategy = make_strategy(config, clients, history)
        client_app = make_client_app(model, clients, config)
        server_app = make_server_app(config, strategy, start, checkpoints)
        InProcessGrid(client_app, clients).serve(server_app)
    work.save_table("curves", history.curves())
    return work.publish()


def code_files(stage: str) -> dict[str, str]:
    """Takes the place of the code's digests: somebody may edit the code while these tests run."""
    return {"code": "the same"}


def _die(history: History, kill: dict) -> None:
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
    stage_work.code_files = code_files
    for parameters, kill in json.loads(sys.argv[1]):
        if (child := os.fork()) == 0:
            train(parameters, kill)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else f"ended with {status}", flush=True)
