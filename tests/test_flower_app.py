"""A real federation on this machine: one SuperLink, three SuperNodes, `flwr run`, against the same run in one process.

Every server binds to 127.0.0.1, on a port that was free; every process is ended by its own id.
"""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from flwr.app import Error
from safetensors.numpy import load_file
from small_federation import federate, whole

from fedmem.cli import main
from fedmem.config.parameter import ConfigError
from fedmem.config.partition import PartitionConfig
from fedmem.config.stages import TrainConfig
from fedmem.models.loading import load_trainable, model_location
from fedmem.results.identity import identity_of, notebook_file
from fedmem.results.stage import Stage, StageError, find_stage, finished_stages
from fedmem.results.work import begin_stage
from fedmem.study.execute import execute
from fedmem.train.federation import client_datasets
from fedmem.train.in_process_grid import ConfigRecord, Context, FederatedError, InProcessGrid, Message, RecordDict
from fedmem.train.network import apps, client_folders
from fedmem.train.network import nodes as network_nodes
from fedmem.train.network.nodes import ClientGrid

REPOSITORY = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CLIENTS = 3
TOLERANCE = 1e-6  # largest difference of one weight from the in-process run's; weights are about 0.1
PARAMETERS = "{algorithm: fedprox, proximal_mu: 0.1, rounds: 2, local_epochs: 1, batch_size: 2, perplexity_rows: 2}"
COMPLAINTS = ["knee pain", "a fever", "a dry cough", "poor sleep", "a rash on both arms", "a rapid heart rate"]


def partition_rows() -> pd.DataFrame:
    """3 clients of 4, 5 and 6 training rows, a test row and a held-out row each."""
    deal = [(client, split) for client in range(CLIENTS) for split in ["train"] * (4 + client) + ["test", "heldout"]]
    rows = pd.DataFrame(deal, columns=["client", "split"])
    texts = [f"patient {i} reports {COMPLAINTS[i % 6]} since day {i * 7 % 31} of the month" for i in range(len(rows))]
    return rows.assign(
        row_id=[f"r{i:02}" for i in range(len(rows))], group="", instruction="", input=texts, output="ok"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where everything of this module is written; FEDMEM_RESULTS points into it."""
    folder = tmp_path_factory.mktemp("federation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDMEM_RESULTS", str(folder / "results"))
        yield folder


@pytest.fixture(scope="module")
def dealt(folder) -> Stage:
    """A finished partition of 3 clients."""
    sizes = {"n_clients": CLIENTS, "train_rows": 4, "test_rows": 1, "heldout_rows": 1}
    work = begin_stage(PartitionConfig.create(sizes))
    work.save_table("rows", partition_rows())
    return work.publish()


# --- clients' folders


def test_each_client_gets_its_own_rows_and_no_others(dealt, tmp_path, capsys):
    assert main.main(["split", str(dealt.folder), str(tmp_path / "out")]) == 0
    printed, everyone = capsys.readouterr().out, partition_rows()
    for client in range(CLIENTS):
        own = client_folders.read_client(tmp_path / "out" / f"client-{client}", client)
        wanted = everyone[(everyone["client"] == client) & (everyone["split"] != "heldout")]
        assert own.to_dict("list") == wanted[own.columns].to_dict("list")
        assert client_folders.rows_digest(own) == client_folders.rows_digest(everyone[everyone["client"] == client])
        assert f"partition-id={client} num-partitions=3" in printed
    assert len(list((tmp_path / "out").rglob("*.parquet"))) == CLIENTS


def test_a_split_over_an_older_one_is_refused(dealt, tmp_path, capsys):
    (tmp_path / "client-7").mkdir()
    assert main.main(["split", str(dealt.folder), str(tmp_path)]) == 2
    assert "client-7 exists already" in capsys.readouterr().err


def test_a_folder_of_another_client_is_refused(dealt, tmp_path):
    client_folders.split_clients(dealt, tmp_path)
    with pytest.raises(StageError, match=r"rows of clients \[1\]; this node is client 2"):
        client_folders.read_client(tmp_path / "client-1", 2)
    with pytest.raises(StageError, match=r"there is no .*rows.parquet"):
        client_folders.read_client(tmp_path, 0)


def test_one_changed_word_changes_the_digest():
    rows = partition_rows()
    changed = rows.assign(input=rows["input"].str.replace("patient 0 ", "patient 1 "))
    assert client_folders.rows_digest(rows) != client_folders.rows_digest(changed)


# --- parameters


def test_parameters_are_yaml_or_a_yaml_file(tmp_path):
    (tmp_path / "p.yaml").write_text("rounds: 3\nlearning_rate: 1e-3\n")
    for text in ("{rounds: 3, learning_rate: 1e-3}", str(tmp_path / "p.yaml")):
        config = apps.read_parameters(text)
        assert (config.rounds, config.learning_rate) == (3, 1e-3)
    for text, message in {
        "3": "a mapping",
        "{round: 3}": "did you mean 'rounds'",
        "{algorithm: central}": "notebook 2",
    }.items():
        with pytest.raises(ConfigError, match=message):
            apps.read_parameters(text)


# --- the server's side, with nodes played by this process


class Wire(InProcessGrid):
    """A SuperLink as the server sees it: nodes under any ids, answers in any order, exceptions as Flower sends them."""

    def __init__(self, configs: dict[int, dict], silent: tuple[int, ...] = ()):
        super().__init__(apps.client_app, configs)
        for node, config in configs.items():
            self.contexts[node].node_config = dict(config)
        self.silent = silent

    def push_messages(self, messages):
        return [self._take(message) for message in messages]

    def pull_messages(self, message_ids):
        ready = [
            i for i in message_ids if i in self.waiting and self.waiting[i].metadata.dst_node_id not in self.silent
        ]
        return [self._sent_back(self.waiting.pop(message_id)) for message_id in reversed(ready)]

    def _sent_back(self, message):
        try:
            return self.client_app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:
            reply = Message(Error(1, f"{type(error)}:<'{error}'>"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1  # as Flower does for nodes that it lost
            return reply


@pytest.fixture
def machines(dealt, tmp_path, monkeypatch) -> dict[int, dict]:
    """{node id: its configuration}; ids fall while clients rise, so that the two orders differ."""
    monkeypatch.setattr(network_nodes, "POLL_SECONDS", 0.01)
    split = client_folders.split_clients(dealt, tmp_path / "split")
    return {
        900 - client: {"partition-id": client, "num-partitions": CLIENTS, "data": str(path)}
        for client, path in enumerate(split)
    }


def serve(wire: Wire, dealt: Stage, parameters: str = PARAMETERS, **settings) -> None:
    given = {"partition": str(dealt.folder), "parameters": parameters, "wait_seconds": 0.3, "round_seconds": 0.3}
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=given | settings)
    apps.server_app(wire, context)


def published(parameters: str, dealt: Stage) -> bool:
    identity = identity_of(apps.read_parameters(parameters), dealt.identity)
    return any(stage.identity == identity for stage in finished_stages("train"))


SMALL = "rounds: 2, local_epochs: 1, batch_size: 2, utility_rows: 0, perplexity_rows: 1"


@pytest.mark.parametrize(
    "parameters",
    [
        f"{{algorithm: fedprox, proximal_mu: 0.1, {SMALL}}}",
        f"{{algorithm: FedAdam, strategy_options: {{eta: 0.01}}, {SMALL}}}",
        f"{{algorithm: fedavg, finetuning: lora, update_clip: 0.05, update_noise: 0.1, {SMALL}}}",
    ],
    ids=["fedprox", "FedAdam", "lora-clipped"],
)
def test_nodes_give_the_in_process_runs_bytes(machines, dealt, tmp_path, parameters):
    serve(Wire(machines), dealt, parameters)
    stage, rows = find_stage("train"), partition_rows()
    config = stage.config
    model, tokenizer = load_trainable(config)
    sets = [client_datasets(rows, tokenizer, config, split=split) for split in ("train", "test")]
    history = federate(model, sets[0], config, tmp_path / "rounds", tokenizer, sets[1])
    assert whole(stage.path("checkpoints")) == whole(tmp_path / "rounds")
    pd.testing.assert_frame_equal(stage.table("curves"), history.curves())
    assert stage.manifest["device"] == "cpu, a federation of 3 nodes"


def test_a_client_that_never_comes_is_named_in_bounded_time(machines, dealt):
    del machines[899]
    begun = time.monotonic()
    with pytest.raises(FederatedError, match=r"did not answer within 0.3 s: 1 \(present: \[0, 2\]"):
        serve(Wire(machines), dealt, "{rounds: 3}")
    assert time.monotonic() - begun < 20
    assert not published("{rounds: 3}", dealt)


def test_a_node_that_is_connected_and_dumb_is_missing_too(machines, dealt):
    with pytest.raises(FederatedError, match=r"did not answer within 0.3 s: 2 .* connected nodes: 3"):
        serve(Wire(machines, silent=(898,)), dealt)


def test_two_nodes_for_one_client_are_refused(machines, dealt):
    machines[5] = machines[900]
    del machines[898]
    with pytest.raises(FederatedError, match="client 0: two nodes claim to be this client"):
        serve(Wire(machines), dealt)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num-partitions": 4}, "client 1: its clients is 4, the server's 3"),
        ({"partition-id": 7}, r"client 7:\nTraceback"),
        ({"partition-id": 2}, r"rows of clients \[1\]; this node is client 2"),
        ({"data": "/nowhere"}, r"client 1:\nTraceback[^$]*there is no /nowhere/rows.parquet"),
    ],
)
def test_a_node_set_up_wrongly_is_named(machines, dealt, change, message):
    machines[899] |= change
    with pytest.raises(FederatedError, match=message):
        serve(Wire(machines), dealt)


def test_a_client_without_training_rows_is_named(machines, dealt):
    path = Path(machines[899]["data"]) / "rows.parquet"
    pd.read_parquet(path).query("split != 'train'").to_parquet(path, index=False)
    with pytest.raises(FederatedError, match=r"client 1:\nTraceback[^$]*holds no training rows"):
        serve(Wire(machines), dealt)


def test_rows_that_are_not_the_partitions_are_refused(machines, dealt):
    path = Path(machines[899]["data"]) / "rows.parquet"
    pd.read_parquet(path).assign(output="no").to_parquet(path, index=False)
    with pytest.raises(FederatedError, match="client 1: its training rows are not those of the partition"):
        serve(Wire(machines), dealt)


def test_other_code_and_another_model_are_refused(machines, dealt, monkeypatch, tmp_path):
    shutil.copytree(model_location("tiny-qwen2"), tmp_path / "other")
    (tmp_path / "other" / "more.json").write_text("{}")
    with pytest.raises(FederatedError, match=r"client 1: its model is .*, the server's"):
        serve(Wire(machines | {899: machines[899] | {"model": str(tmp_path / "other")}}), dealt)
    digests = iter(["the server's", *["a node's"] * CLIENTS])
    monkeypatch.setattr(apps, "module_digest", lambda module: next(digests))
    with pytest.raises(FederatedError, match="its code is a node's, the server's the server's"):
        serve(Wire(machines), dealt)


def test_telemetry_that_is_on_is_refused(machines, dealt, monkeypatch):
    monkeypatch.setattr("flwr.supercore.telemetry.FLWR_TELEMETRY_ENABLED", "1")
    with pytest.raises(FederatedError, match="set FLWR_TELEMETRY_ENABLED=0"):
        serve(Wire(machines), dealt)


def test_a_client_that_fails_in_a_round_ends_the_run_with_its_traceback(machines, dealt):
    """The penalty of μ = 1e38 overflows as soon as the weights have moved."""
    parameters = "{algorithm: fedprox, proximal_mu: 1e38, rounds: 1, batch_size: 2}"
    with pytest.raises(FederatedError, match=r"client \d, round 1: failed[^$]*Traceback[^$]*penalty inf"):
        serve(Wire(machines), dealt, parameters)
    assert not published(parameters, dealt)


def asked(wire: Wire, content: RecordDict):
    """The answers of all clients to one message each, waited for as long as 0.1 s."""
    grid = ClientGrid(wire, {0: 900, 1: 899, 2: 898}, "{}", seconds=0.1)
    return grid.send_and_receive([Message(content, client, "train") for client in range(CLIENTS)])


def test_a_client_that_stops_answering_in_a_round_is_named(machines):
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    with pytest.raises(FederatedError, match=r"round 1: no answer within 0.1 s from clients: 0, 1, 2"):
        next(asked(Wire(machines, silent=(898, 899, 900)), content))


def test_a_failed_client_ends_the_round_while_others_still_train(machines):
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    with pytest.raises(FederatedError, match=r"client 1, round 1: failed with Flower's code 1[^$]*Traceback"):
        next(asked(Wire(machines, silent=(898, 900)), content))


# --- the federation


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def end_with_parent() -> None:
    """For a child about to run: end when the tests' process ends, however it does (PR_SET_PDEATHSIG, Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class Federation:
    """A SuperLink and a SuperNode for each client, each a process of this test's own."""

    def __init__(self, folder: Path, nodes: list[Path]):
        self.folder, self.data, self.port = folder, nodes, free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        for name in ("flower", "home", "tmp", "nodes-results", "app"):
            (folder / name).mkdir()
        for name in ("pyproject.toml", "LICENSE"):  # all that is packed; the repository takes longer to search
            shutil.copy(REPOSITORY / name, folder / "app")
        address = f'[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (folder / "flower" / "config.toml").write_text(address)
        self.environment = os.environ | {
            "FLWR_HOME": str(folder / "flower"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def start_link(self) -> None:
        here = ["--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        self._start("link", "flower-superlink", *here, "--disable-runtime-dependency-installation")
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            assert time.monotonic() < end, self.log("link")
            time.sleep(0.2)

    def start_node(self, client: int) -> None:
        node = f'partition-id={client} num-partitions={len(self.data)} data="{self.data[client]}"'
        link = ["--insecure", "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1"]
        own = {"FEDMEM_RESULTS": str(self.folder / "nodes-results")}  # a node has no partition
        self._start(
            f"node-{client}", "flower-supernode", *link, "--port", str(free_port()), "--node-config", node, **own
        )

    def _start(self, name: str, command: str, *arguments: str, **environment: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [BIN / command, *arguments],
                stdout=log, stderr=subprocess.STDOUT, cwd=self.folder / "tmp", env=self.environment | environment,
                start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own group: what it started and did not end
        process.wait(timeout=20)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def run(self, parameters: str, **settings: object) -> tuple[str, str]:
        """`flwr run` to its end: (status, what --stream shows)."""
        given = {"wait_seconds": 120, "round_seconds": 240} | settings
        override = " ".join([f"parameters='{parameters}'", *(f"{key}={value}" for key, value in given.items())])
        shown = self._flwr("run", str(self.folder / "app"), "here", "--stream", "--run-config", override)
        made = json.loads(self._flwr("ls", "here", "--format", "json"))["runs"]
        return max(made, key=lambda run: run["pending-at"])["status"], shown

    def _flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [BIN / "flwr", *arguments], capture_output=True, text=True, timeout=600, env=self.environment,
            cwd=self.folder / "tmp",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def federation(folder, dealt):
    """SuperLink and three nodes, up before the first test and ended after the last one."""
    split = client_folders.split_clients(dealt, folder / "split")
    nodes = [path.rename(folder / f"machine-{client}") for client, path in enumerate(split)]
    federation = Federation(folder, nodes)
    try:
        federation.start_link()
        for client in range(CLIENTS):
            federation.start_node(client)
        yield federation
    finally:
        for name in list(federation.processes):
            federation.stop(name)


@pytest.fixture(scope="module")
def in_process(folder, dealt) -> Stage:
    """The same training by notebook 2, in results of its own."""
    results = folder / "in-process"
    shutil.copytree(folder / "results" / "partition", results / "partition")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDMEM_RESULTS", str(results))
        values = apps.read_parameters(PARAMETERS).model_dump()
        shown = {name: values.pop(name) for name in TrainConfig.shown}
        execute(notebook_file("train"), folder / "2_train.ipynb", shown | {"options": values})
        return find_stage("train")


@pytest.mark.notebooks
def test_a_real_federation_gives_the_in_process_runs_weights(federation, in_process):
    status, shown = federation.run(PARAMETERS)
    assert status == "finished:completed", shown
    stage = find_stage("train")
    assert f"published results/train/{stage.folder.name}" in shown
    assert all(f"round {i}: client {client} has answered" in shown for i in (1, 2) for client in range(CLIENTS))
    assert (stage.folder.name, stage.identity) == (in_process.folder.name, in_process.identity)
    assert stage.manifest["files"].keys() == {f for f in in_process.manifest["files"] if not f.startswith("figures/")}
    for server_round in range(3):
        name = f"checkpoints/round-{server_round}/model.safetensors"
        deployed, other = load_file(stage.path(name)), load_file(in_process.path(name))
        assert deployed.keys() == other.keys()
        assert max(abs(deployed[key] - other[key]).max() for key in other) <= TOLERANCE
    for name in ("curves", "utility"):
        pd.testing.assert_frame_equal(stage.table(name), in_process.table(name), atol=TOLERANCE, rtol=TOLERANCE)
    assert stage.manifest["device"].endswith("a federation of 3 nodes")


@pytest.mark.notebooks
def test_a_client_without_its_rows_is_a_failed_run_that_says_so(federation, dealt):
    rows = federation.data[1] / "rows.parquet"
    rows.rename(rows.with_suffix(".away"))
    try:
        status, shown = federation.run("{rounds: 4}")
    finally:
        rows.with_suffix(".away").rename(rows)
    assert status == "finished:failed"
    assert "client 1:\nTraceback" in shown
    assert f"there is no {rows}" in shown
    assert f"there is no {rows}" in federation.log("node-1")
    assert not published("{rounds: 4}", dealt)


@pytest.mark.notebooks
def test_a_node_that_is_not_there_is_a_failed_run_that_names_its_client(federation, dealt):
    federation.stop("node-2")
    try:
        status, shown = federation.run("{rounds: 4}", wait_seconds=20)
    finally:
        federation.start_node(2)
    assert status == "finished:failed"
    missing = re.search(r"clients that did not answer within 20 s: ([\d, ]+) \(present", shown)
    assert "2" in missing[1]  # and on a machine that is very busy, others
    assert not published("{rounds: 4}", dealt)


@pytest.mark.notebooks
def test_nothing_is_written_outside_results_and_the_temporary_folder(federation):
    assert list((federation.folder / "home").iterdir()) == []
    assert list((federation.folder / "nodes-results").iterdir()) == []
