"""The Elasticsearch engine against a server: the cluster at FEDMEM_ES_URL where that is set, else noida-db.

noida-db is a small server that speaks Elasticsearch 8's protocol, started here on 127.0.0.1 and ended by its process.
It is not Lucene: what is shown is that the official client, the requests and the ranking fit together.
"""

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import elasticsearch
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmem.detect import find_candidates, find_matches, retrieval_record
from fedmem.results.stage import finished_stages
from fedmem.retrieval.bm25 import BM25Index
from fedmem.retrieval.elasticsearch.engine import Elastic
from fedmem.retrieval.elasticsearch.orphaned_indices import ALIAS, NAME, leftovers, remove
from fedmem.retrieval.elasticsearch.server import Connection, ElasticError, Patience
from fedmem.retrieval.tokens import stop_words, tokens

REPOSITORY = Path(__file__).resolve().parent.parent
GOLDEN = json.loads((Path(__file__).parent / "data" / "lucene_bm25.json").read_text("utf-8"))
any_text = st.text(st.characters(exclude_categories=()), max_size=40)
words = st.lists(st.sampled_from(["fever", "cough", "lung", "the", "of", "İ", "肺", "_"]), max_size=8).map(" ".join)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def noida(folder, port):
    """A running noida-db; the caller ends it."""
    import noida_db

    binary = Path(noida_db.__file__).parent / "noida-db"
    if not os.access(binary, os.X_OK):
        binary.chmod(0o755)
    command = [
        str(binary),
        "start",
        "--only",
        "elasticsearch",
        "--elasticsearch-port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    process = subprocess.Popen(
        [*command, "--data-dir", str(folder)], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.05)
    end(process)
    raise AssertionError(f"noida-db did not open port {port} (exit status {process.returncode})")


def end(process):
    process.terminate()
    process.wait(20)


@pytest.fixture(scope="module")
def connection(tmp_path_factory):
    if os.environ.get("FEDMEM_ES_URL"):
        yield Connection.from_environment()
        return
    if elasticsearch.__version__[0] > 8:
        pytest.skip("noida-db answers as Elasticsearch 8: pip install 'elasticsearch<9', or set FEDMEM_ES_URL")
    port = free_port()
    process = noida(tmp_path_factory.mktemp("noida"), port)
    yield Connection(f"http://127.0.0.1:{port}")
    end(process)


@pytest.fixture
def engine(connection):
    """An engine; when a test is over it has left nothing behind."""
    one = Elastic(connection, run=uuid.uuid4().hex)
    yield one
    assert ours(one) == []


def ours(engine):
    return [one["name"] for one in leftovers(engine.server) if one["run"] == engine._run]


def agree(found, expected):
    assert [[row for row, _ in hits] for hits in found] == [[row for row, _ in hits] for hits in expected]
    for hits, others in zip(found, expected, strict=True):  # 1e-5: single precision, summed in another order
        assert [score for _, score in hits] == pytest.approx([score for _, score in others], rel=1e-5)


# --- one ranking ----------------------------------------------------------------------------------------------------


def test_rankings_are_the_embedded_engines(engine):
    texts = GOLDEN["docs"][:100]
    queries = [" ".join(query.split()[:12]) for query in GOLDEN["queries"]]
    with engine.index(texts) as index:
        agree(index.search(queries, 10), BM25Index.build(texts).search(queries, 10))
        agree(index.search(queries[:5], 3, True), BM25Index.build(texts).search(queries[:5], 3, True))


ODD = [
    "",
    "...",
    "fever",
    "Fever fever",
    "fever",
    "İstanbul ΑΣ",
    "肺炎",
    "x\ud800y",
    "a" * 40_000,
    "the of",
    "\x00\u2028",
]


def test_odd_texts_and_queries(engine):
    queries = ["", "the", "fever", "fever fever the", "istanbul", "炎", "a" * 255, "\udfff", "y x", "zzz"]
    with engine.index(ODD) as index:
        assert len(index) == len(ODD)
        agree(index.search(queries, 50), BM25Index.build(ODD).search(queries, 50))  # 50 is more than there are
        agree(index.search(queries, 50, True), BM25Index.build(ODD).search(queries, 50, True))
        assert [row for row, _ in index.search(["fever"], 9)[0]][-2:] == [2, 4]  # copies keep their rows, in order
        assert [row for row, _ in index.search(["a" * 255], 9)[0]] == [8]  # 40,000 letters without a space (B58)
        with pytest.raises(ValueError, match="top_n: got 0"):
            index.search(["fever"], 0)


def test_no_text_no_index(engine):
    for texts in ([], ["", "..."]):  # B59
        with engine.index(texts) as index:
            assert ours(engine) == []
            assert index.search(["fever", ""], 5) == [[], []]
            assert len(index) == len(texts)


def test_a_search_right_after_indexing_finds_all(engine):
    with engine.index(["fever a", "fever b", "fever c"]) as index:  # B53: no sleep
        assert sorted(row for row, _ in index.search(["fever"], 10)[0]) == [0, 1, 2]


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(any_text | words, max_size=5),
    queries=st.lists(any_text | words, max_size=3),
    top_n=st.integers(1, 8),
)
def test_any_unicode_is_answered_alike(engine, texts, queries, top_n):
    with engine.index(texts) as index:
        found = index.search(queries, top_n)
    agree(found, BM25Index.build(texts).search(queries, top_n))
    assert all(len(hits) <= min(top_n, len(texts)) and all(score > 0 for _, score in hits) for hits in found)


def test_long_queries_are_cut_alike(engine):
    query = " ".join(f"w{i}" for i in range(1200))
    texts = ["w0 w1", "w1023", "w1024 w1199"]  # the last has only words beyond the first 1,024
    with engine.index(texts) as index:
        found = index.search([query], 5)
    agree(found, BM25Index.build(texts).search([query], 5))
    assert sorted(row for row, _ in found[0]) == [0, 1]


def tables():
    texts = GOLDEN["docs"][:40]
    suffixes = pd.DataFrame({"suffix_id": [f"s{i}" for i in range(40)], "suffix": texts})
    suffixes["client"], suffixes["member"] = [i % 2 for i in range(40)], [i < 30 for i in range(40)]
    suffixes.loc[0, "suffix"] = "..."
    continuations = [" ".join(query.split()[:12]) for query in GOLDEN["queries"][:6]] + ["", "the of", "lung " * 30]
    prefixes = pd.DataFrame({"prefix_id": [f"p{i}" for i in range(9)], "client": 0, "continuation": continuations})
    return prefixes, suffixes


def test_candidates_are_the_same_and_the_record_says_what_was_left_out(engine):
    prefixes, suffixes = tables()
    for limit in (1024, 3):
        mine = find_candidates(prefixes, suffixes, 4, engine, limit)
        pd.testing.assert_frame_equal(mine, find_candidates(prefixes, suffixes, 4, max_query_terms=limit), rtol=1e-5)
        assert len(mine) > 50
    record = retrieval_record(prefixes, suffixes, max_query_terms=3)
    assert record["queries"] == 9
    assert record["without_words"] == ["p6", "p7"]
    assert set(record["cut"]) == {f"p{i}" for i in range(6)}  # "lung" alone is one word
    assert record["cut"]["p0"] == len(set(tokens(prefixes["continuation"][0])) - stop_words())
    # even rows are client 0's: 15 members, one without words, and 5 held out
    assert record["indices"][0] == {"client": 0, "member": False, "texts": 5, "without_words": 0}
    assert record["indices"][1] == {"client": 0, "member": True, "texts": 15, "without_words": 1}
    json.dumps(record)


def test_the_index_is_as_stated(engine):
    with engine.index(["fever"]):
        [name] = ours(engine)
        assert NAME.fullmatch(name)
        indices = engine.server.client.indices
        mapping = indices.get_mapping(index=name)[name]["mappings"]
        assert mapping["properties"]["text"]["type"] == "text"
        assert "fields" not in mapping["properties"]["text"]  # no keyword beside it (B58)
        assert mapping["_meta"]["fedmem"]["run"] == engine._run
        stated = indices.get_settings(index=name)[name]["settings"]["index"]
        assert (stated["number_of_shards"], stated["number_of_replicas"]) == ("1", "0")
        assert list(indices.get_alias(name=ALIAS)).count(name) == 1


def test_shards_are_passed_on(connection):
    engine = Elastic(connection, run=uuid.uuid4().hex, shards=3)
    with engine.index(["fever", "cough"]) as index:
        [name] = ours(engine)
        stated = engine.server.client.indices.get_settings(index=name)[name]["settings"]["index"]
        assert stated["number_of_shards"] == "3"
        assert index.search(["cough"], 2)[0][0][0] == 1


# --- faults on a server that is there -------------------------------------------------------------------------------


def test_an_index_that_somebody_deletes_is_built_anew(engine):
    texts = ["fever", "cough", "lung fever"]
    with engine.index(texts) as index:
        before = index.search(["fever"], 3)
        [name] = ours(engine)
        engine.server.client.indices.delete(index=name)
        assert index.search(["fever"], 3) == before
        [another] = ours(engine)
        assert another != name
        engine.server.client.indices.delete(index=another)
        with pytest.raises(ElasticError, match="vanished, and so did its successor"):
            index.search(["fever"], 3)


@pytest.mark.skipif(elasticsearch.__version__[0] > 8, reason="noida-db needs client 8")
def test_a_server_that_is_restarted_while_in_use(tmp_path):
    port = free_port()
    process = noida(tmp_path, port)
    patience = Patience(answer_s=5, attempts=8, first_pause_s=0.2, longest_pause_s=1)
    engine, again = Elastic(Connection(f"http://127.0.0.1:{port}"), patience=patience), []
    try:
        with engine.index(GOLDEN["docs"][:20]) as index:
            before = index.search(["patients with fever"], 5)
            end(process)
            timer = threading.Timer(0.5, lambda: again.append(noida(tmp_path, port)))
            timer.start()
            assert index.search(["patients with fever"], 5) == before
            timer.join()
        assert ours(engine) == []
    finally:
        for one in [process, *again]:
            end(one)


def test_a_stage_that_was_broken_off_begins_anew_and_gives_the_same(connection, monkeypatch):
    prefixes, suffixes = tables()
    whole = find_candidates(prefixes, suffixes, 4, Elastic(connection))
    broken = Elastic(connection, run=uuid.uuid4().hex)
    searches, search = [], Elastic.search

    def stop_at_the_third(self, *arguments):
        searches.append(1)
        if len(searches) == 3:
            raise KeyboardInterrupt
        return search(self, *arguments)

    monkeypatch.setattr(Elastic, "search", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        find_candidates(prefixes, suffixes, 4, broken)
    assert ours(broken) == []
    pd.testing.assert_frame_equal(find_candidates(prefixes, suffixes, 4, Elastic(connection)), whole, check_exact=True)


# --- what is not ours -----------------------------------------------------------------------------------------------


@contextmanager
def foreign(client, name):
    """Somebody's index with two documents."""
    client.indices.create(index=name, aliases={ALIAS: {}})  # even with fedmem's alias
    client.bulk(index=name, operations=[{"index": {"_id": "1"}}, {"a": "b"}, {"index": {"_id": "2"}}, {"a": "c"}])
    client.indices.refresh(index=name)
    yield
    client.indices.delete(index=name)


def state(client, names):
    return [(dict(client.indices.get(index=name)), client.count(index=name)["count"]) for name in names]


def test_foreign_indices_are_untouched(engine):  # B56
    client, mark = engine.server.client, uuid.uuid4().hex[:8]
    names = [f"other-{mark}", f"fedmem-{mark}"]
    with foreign(client, names[0]), foreign(client, names[1]):
        before = state(client, names)
        prefixes, suffixes = tables()
        assert len(find_candidates(prefixes, suffixes, 3, engine)) > 50
        assert not {one["name"] for one in leftovers(engine.server)} & set(names)
        with pytest.raises(ElasticError, match="fedmem did not create this index, so it is not deleted"):
            remove(engine.server, names[1])
        with pytest.raises(ElasticError, match="not a name that fedmem gives"):
            remove(engine.server, names[0])
        with pytest.raises(ElasticError, match="not a name that fedmem gives"):
            remove(engine.server, "fedmem-*")
        assert state(client, names) == before
        assert before[0][1] == 2


KEEP_AN_INDEX = """
import sys, time
from fedmem.retrieval.elasticsearch.engine import Elastic
from fedmem.retrieval.elasticsearch.server import Connection
with Elastic(Connection.from_environment(), run=sys.argv[1]).index(["fever"], "0-member"):
    print("there", flush=True)
    time.sleep(120)
"""


def test_a_killed_runs_index_is_listed_and_removed_by_name(engine, connection):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    environment.setdefault("FEDMEM_ES_URL", connection.url)

    def command(*arguments):
        line = [sys.executable, "-m", "fedmem.cli.main", "elasticsearch", *arguments]
        return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)

    process = subprocess.Popen(
        [sys.executable, "-c", KEEP_AN_INDEX, engine._run], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "there\n"
        [name] = ours(engine)
        assert re.fullmatch(f"fedmem-{engine._run[:8]}-0-member-[0-9a-f]{{16}}", name)
        assert re.search(rf"^{name} .* in use$", command("leftovers").stdout, re.MULTILINE)
        refused = command("remove", name)
        assert refused.returncode == 1
        assert f"process {process.pid} is using it" in refused.stderr
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert re.search(rf"^{name} .* left behind$", command("leftovers").stdout, re.MULTILINE)
    removed = command("remove", name)
    assert removed.returncode == 0
    assert f"removed {name}" in removed.stdout
    assert name not in command("leftovers").stdout
    again = command("remove", name)
    assert again.returncode == 1
    assert "not found" in again.stderr


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_an_index_goes_when_its_run_is_interrupted(engine, stop):
    def interrupted():
        with engine.index(["fever"]):
            assert len(ours(engine)) == 1
            raise stop

    with pytest.raises(stop):
        interrupted()
    assert ours(engine) == []


# --- the stage, with a password (B09) -------------------------------------------------------------------------------


@pytest.mark.notebooks
def test_a_run_on_the_server_matches_the_embedded_one_and_writes_no_secret(connection, tmp_path):
    user, password = connection.user or "fedmem-reader", connection.password or f"hunter2-{uuid.uuid4().hex}/+"
    who = {"FEDMEM_ES_URL": connection.url, "FEDMEM_ES_USER": user, "FEDMEM_ES_PASSWORD": password}
    if connection.api_key:
        who = {"FEDMEM_ES_URL": connection.url, "FEDMEM_ES_API_KEY": connection.api_key}
        password = connection.api_key
    study = tmp_path / "params" / "studies" / "tiny.yaml"
    for part in ("base", "tasks"):
        for file in (REPOSITORY / "params" / part).glob("*.yaml"):
            (tmp_path / "params" / part).mkdir(parents=True, exist_ok=True)
            (tmp_path / "params" / part / file.name).write_text(file.read_text())
    study.parent.mkdir()
    study.write_text(
        "title: Alike?\nbase: small\nparameters: {algorithm: none, train_rows: 6, test_rows: 2, heldout_rows: 6, "
        "n_prefixes: 4, max_new_tokens: 30, prefix_tokens: 20, retriever: elasticsearch}\n"
    )

    def run(**environment):
        settings = os.environ | {"PYTHONPATH": str(REPOSITORY), "FEDMEM_RESULTS": str(tmp_path / "results")}
        line = [sys.executable, "-m", "fedmem.cli.main", "run", str(study), "--cores", "2"]
        done = subprocess.run(
            line, env=settings | who | environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=600
        )
        (tmp_path / "output.txt").write_text(done.stdout + done.stderr)
        return done

    token = base64.b64encode(f"{user}:{password}".encode())
    secrets = [password.encode(), quote(password, safe="").encode(), token, base64.b64encode(password.encode())]

    def leaky():
        """Files that hold a secret, among all that a run wrote, which are of these kinds at least."""
        written = [path for path in tmp_path.rglob("*") if path.is_file()]
        kinds = {path.suffix for path in written} | {path.name for path in written}
        assert {".ipynb", ".html", "manifest.json", "snakemake.log", "jobs.json", "output.txt"} <= kinds
        return [path for path in written if any(secret in path.read_bytes() for secret in secrets)]

    bad = run(FEDMEM_ES_URL=f"http://127.0.0.1:{free_port()}")
    assert bad.returncode == 1
    assert "no connection" in bad.stderr
    assert len(list(tmp_path.glob("results/detect/elasticsearch*.failed.ipynb"))) == 1
    assert leaky() == []

    good = run()  # goes on where the other stopped
    assert good.returncode == 0, good.stderr
    assert leaky() == []
    detected, generated = (finished_stages(stage, tmp_path / "results")[0] for stage in ("detect", "generate"))
    prefixes, suffixes = generated.table("prefixes"), generated.table("suffixes")
    expected = find_matches(find_candidates(prefixes, suffixes, 10), prefixes, suffixes, progress=False)
    matches = detected.table("matches")
    pd.testing.assert_frame_equal(matches, expected, rtol=1e-5, check_dtype=False)
    record = detected.json("retrieval")
    assert record["engine"] == "elasticsearch"
    assert record == record | retrieval_record(prefixes, suffixes)
