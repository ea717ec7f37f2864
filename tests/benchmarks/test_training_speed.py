"""What a federation costs over one plain training, and what averaging holds. Run: pytest tests/benchmarks

Both are measured in a fresh process, on one thread; nothing else should run meanwhile. Figures go into the benchmark's
extra_info and onto the screen.
"""

import json
import os
import subprocess
import sys

import pytest

N_CLIENTS, N_ROUNDS, N_STEPS, N_ROWS = 3, 10, 20, 40
MODEL_MB = 128

TRAINING = """
import copy, json, sys, tempfile, time
import torch
from pathlib import Path
from transformers import Trainer, TrainingArguments
from fedmem.config.stages import TrainConfig
from fedmem.models.loading import load_model
from fedmem.corpus.synthetic import make_corpus
from fedmem.models.examples import encode, pad_batch
from fedmem.train.history import History
from fedmem.train.checkpoints import Checkpoints
from fedmem.train.strategies import make_strategy
from fedmem.train.federation import make_client_app, make_server_app
from fedmem.train.weights import get_arrays
from fedmem.train.in_process_grid import InProcessGrid

n_clients, n_rounds, n_steps, n_rows, repetitions = map(int, sys.argv[1:])
config = TrainConfig(algorithm="fedavg", rounds=n_rounds, local_steps=n_steps, batch_size=4)
base, tokenizer = load_model(config.model, "cpu")
rows = make_corpus("qa", n_clients, n_rows, seed=1)
sets = {
    client: encode(tokenizer, rows.iloc[client * n_rows : (client + 1) * n_rows], config.max_tokens)
    for client in range(n_clients)
}
pooled = [row for client in sets.values() for row in client.items]


def plain(model, folder):
    arguments = TrainingArguments(
        output_dir=folder, max_steps=n_clients * n_rounds * n_steps, per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate, weight_decay=config.weight_decay, lr_scheduler_type="constant",
        use_cpu=True, remove_unused_columns=False, logging_strategy="no", save_strategy="no", report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=pooled, data_collator=pad_batch)
    trainer.train()
    return trainer.state.global_step


def in_process(model, folder):
    history = History()
    checkpoints = Checkpoints(Path(folder) / "checkpoints", model, tokenizer, {}, config, history)
    strategy = make_strategy(config, n_clients, history)
    server_app = make_server_app(config, strategy, get_arrays(model), checkpoints)
    client_app = make_client_app(model, sets, config)
    InProcessGrid(client_app, range(n_clients)).serve(server_app)
    return int(history.curves().query("metric == 'train_loss'")["steps"].sum())


def measured(work):
    with tempfile.TemporaryDirectory() as folder:
        model, begun, wall = copy.deepcopy(base), time.process_time(), time.perf_counter()
        steps = work(model, folder)
        return steps, time.process_time() - begun, time.perf_counter() - wall


torch.set_num_threads(1)
found = {work.__name__: [] for work in (plain, in_process)}
for _ in range(repetitions):  # in turns, so that a busy minute falls on both
    for work in (plain, in_process):
        found[work.__name__].append(measured(work))
print(json.dumps(found))
"""

MEMORY = """
import json, sys
import numpy as np
from types import SimpleNamespace
from pathlib import Path
from flwr.serverapp import strategy as stock
from fedmem.train.in_process_grid import Array, ArrayRecord, ClientApp, InProcessGrid, Message, MetricRecord, RecordDict
from fedmem.config.stages import TrainConfig
from fedmem.train.strategies import make_strategy
from fedmem.train.history import History
from fedmem.train.federation import serve_rounds

which, megabytes, n_clients = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
app = ClientApp()


@app.train()
def train(message, context):
    client, received, arrays = context.node_config["partition-id"], message.content["arrays"], ArrayRecord()
    for name in received:
        arrays[name] = Array(received[name].numpy() + np.float32(client + 1))
    figures = {"num-examples": 1, "client": client, "tokens": 1, "steps": 1}
    figures |= {name: 1.0 for name in ("train_loss", "penalty", "drift", "seconds")}
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(figures)}), reply_to=message)


def resident(field):
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) / 1024


config = TrainConfig(rounds=2)
grid = InProcessGrid(app, range(n_clients))
strategy = make_strategy(config, n_clients, History())
last = {}


def evaluate_fn(server_round, arrays, state):
    last["w"] = float(arrays["3"].numpy()[0])


checkpoints = SimpleNamespace(done=None, evaluate_fn=evaluate_fn)
before = resident("VmRSS")
start = ArrayRecord({str(i): Array(np.zeros(megabytes * 2**14, dtype="float32")) for i in range(16)})
if which == "fedmem":
    serve_rounds(grid, config, strategy, start, checkpoints)
    assert last["w"] == n_clients + 1, last  # twice the mean of 1 … n
else:
    stock.FedAvg(fraction_evaluate=0.0).start(grid=grid, initial_arrays=start, num_rounds=2)
print(json.dumps((resident("VmHWM") - before) / megabytes))
"""


def run(script: str, *arguments) -> object:
    """What a script prints last, as JSON, run in a process of its own on one thread."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_federation_takes_the_time_of_its_steps(benchmark, capsys):
    """CPU seconds of 3 clients × 10 rounds × 20 steps, checkpoints included, and of 600 steps of a plain Trainer."""
    sizes = (N_CLIENTS, N_ROUNDS, N_STEPS, N_ROWS)
    found = benchmark.pedantic(lambda: run(TRAINING, *sizes, 2), rounds=1)
    n_steps = N_CLIENTS * N_ROUNDS * N_STEPS
    assert [steps for runs in found.values() for steps, _, _ in runs] == [n_steps] * 4
    seconds = {name: min(cpu for _, cpu, _ in runs) for name, runs in found.items()}
    ratio = seconds["in_process"] / seconds["plain"]
    benchmark.extra_info |= {"cpu_seconds": seconds, "ratio": ratio, "aim": 1.10, "load": os.getloadavg()[0]}
    with capsys.disabled():
        print(f"\n{n_steps} steps: plain {seconds['plain']:.1f} s of CPU, ", end="")
        print(f"federated {seconds['in_process']:.1f} s, ratio {ratio:.3f}")


@pytest.mark.parametrize("n_clients", [3, 10])
def test_averaging_holds_few_models(benchmark, capsys, n_clients):
    """Highest resident memory of two rounds of a 128 MB model, global weights included, in units of the model."""
    models = {
        "fedmem": benchmark.pedantic(lambda: run(MEMORY, "fedmem", MODEL_MB, n_clients), rounds=1),
        "flower": run(MEMORY, "flower", MODEL_MB, n_clients),
    }
    benchmark.extra_info |= {"models_held": models, "aim": 3, "n_clients": n_clients}
    with capsys.disabled():
        print(f"\n{n_clients} clients: {models['fedmem']:.2f} models held, Flower's own FedAvg {models['flower']:.2f}")
