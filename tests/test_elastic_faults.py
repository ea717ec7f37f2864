"""The Elasticsearch engine against a stub server that misbehaves on purpose: every fault, and what is said about it."""

import base64
import datetime
import json
import re
import ssl
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import elasticsearch
import pytest

from fedmem.cli import main
from fedmem.config.stages import DetectConfig
from fedmem.retrieval import open_engine
from fedmem.retrieval.elasticsearch import engine as elasticsearch_engine
from fedmem.retrieval.elasticsearch import orphaned_indices
from fedmem.retrieval.elasticsearch.engine import Elastic
from fedmem.retrieval.elasticsearch.orphaned_indices import NAME
from fedmem.retrieval.elasticsearch.server import Connection, ElasticError, Patience

CLIENT = elasticsearch.__version__[0]
QUICK = Patience(answer_s=0.5, attempts=4, first_pause_s=0.01, longest_pause_s=0.02)
TEXTS = ["fever", "cough", "lung"]
KINDS = {  # what the paths ask for, most particular first
    "bulk": "/_bulk", "msearch": "/_msearch", "refresh": "/_refresh", "count": "/_count", "health": "/_cluster/health",
    "nodes": "/_nodes", "alias": "/_alias", "mapping": "/_mapping",
}  # fmt: skip


class Stub(BaseHTTPRequestHandler):
    """Answers as an Elasticsearch would, unless `server.faults[kind]` has something else for the nth such request."""

    protocol_version = "HTTP/1.1"
    wbufsize = 65536  # one packet an answer

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = next((kind for kind, part in KINDS.items() if part in self.path), None)
        if kind is None:
            kind = "info" if self.path == "/" else {"PUT": "create", "DELETE": "delete"}[self.command]
        stub = self.server
        headers = {name.lower(): value for name, value in self.headers.items()}
        stub.log.append((kind, self.command, self.path, headers, body))
        fault = stub.faults.get(kind)
        if callable(fault):
            fault = fault(sum(one[0] == kind for one in stub.log), body)
        if fault == "hang":
            time.sleep(1.5)
        if fault in ("hang", "cut"):
            self.close_connection = True
            self.connection.close()
            return
        status, reply = fault if fault is not None else (200, getattr(self, kind)(body))
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        if stub.product:
            self.send_header("X-Elastic-Product", "Elasticsearch")
        self.send_header("Content-Type", f"application/vnd.elasticsearch+json;compatible-with={CLIENT}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def log_message(self, *arguments):
        pass

    def info(self, body):
        return {"version": {"number": self.server.version}, "tagline": "You Know, for Search"}

    def health(self, body):
        return {"status": "green"}

    def nodes(self, body):
        return {"nodes": {"one": {"settings": self.server.settings}}}

    def create(self, body):
        self.server.indices[self.path.strip("/")] = json.loads(body)
        return {"acknowledged": True, "shards_acknowledged": True}

    def bulk(self, body):
        lines = [json.loads(line) for line in body.splitlines()]
        items = [{"index": {"_id": line["index"]["_id"], "status": 201}} for line in lines[::2]]
        self.server.rows |= {item["index"]["_id"] for item in items}
        return {"items": items}

    def refresh(self, body):
        return {"_shards": {"failed": 0}}

    def count(self, body):
        return {"count": len(self.server.rows)}

    def mapping(self, body):
        name = self.path.split("/")[1]
        return {name: {"mappings": self.server.indices[name]["mappings"]}}

    def msearch(self, body):
        return {"responses": [found(0) for _ in body.splitlines()[::2]]}

    def delete(self, body):
        self.server.indices.pop(self.path.split("?")[0].strip("/"), None)
        self.server.rows = set()
        return {"acknowledged": True}


def found(row, **other):
    hits = [{"_id": str(row), "sort": [2.2, row]}]
    return {"status": 200, "timed_out": False, "_shards": {"failed": 0}, "hits": {"hits": hits}} | other


def start(port=0, context=None):
    server = ThreadingHTTPServer(("127.0.0.1", port), Stub)
    server.daemon_threads = True
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.version, server.product, server.settings = f"{CLIENT}.15.0", True, {}
    server.log, server.faults, server.indices, server.rows = [], {}, {}, set()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@pytest.fixture
def stub():
    """A stub server; whatever a test did, no request may have named a wildcard or everything."""
    server = start()
    yield server
    server.shutdown()
    server.server_close()
    for _, method, path, *_ in server.log:
        assert "*" not in path
        assert "_all" not in path
        if method == "DELETE":
            assert NAME.fullmatch(path.split("?")[0].strip("/"))


def engine(stub, patience=QUICK, **other):
    return Elastic(Connection(f"http://127.0.0.1:{stub.server_port}"), "run", patience=patience, **other)


def use(stub, texts=TEXTS, **other):
    with engine(stub, **other).index(texts) as index:
        return index.search(["fever", "cough"], 2)


def requests(stub):
    return Counter(kind for kind, *_ in stub.log)


def first(n, fault):
    """`fault` for the first n requests of a kind, then a good answer."""
    return lambda number, body: fault if number <= n else None


# --- what passes by itself ------------------------------------------------------------------------------------------


def test_a_good_server_is_asked_each_thing_once(stub):
    assert use(stub) == [[(0, pytest.approx(1.0))]] * 2  # 2.2 ∕ (k1 + 1) = 1
    kinds = ["info", "health", "nodes", "create", "bulk", "refresh", "count", "mapping", "msearch", "delete"]
    assert [kind for kind, *_ in stub.log] == kinds
    assert stub.indices == {}


FAULTS = {"429": (429, {}), "503": (503, {"error": {"type": "unavailable"}}), "cut": "cut", "hang": "hang"}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["info", "create", "bulk", "msearch"])
def test_twice_a_fault_then_good(stub, kind, fault):
    stub.faults[kind] = first(2, FAULTS[fault])
    assert use(stub) == [[(0, pytest.approx(1.0))]] * 2
    assert requests(stub)[kind] == 3
    assert stub.indices == {}


def busy_items(body, status=429):
    items = [{"index": {"_id": json.loads(line)["index"]["_id"], "status": 201}} for line in body.splitlines()[::2]]
    items[1] = {"index": {"_id": "1", "status": status, "error": {"type": "es_rejected_execution_exception"}}}
    return 200, {"items": items}


def test_a_row_or_a_query_that_was_too_much_is_sent_again(stub):
    stub.faults["bulk"] = lambda number, body: busy_items(body) if number <= 2 else None
    busy = {"status": 503, "error": {"type": "search_phase_execution_exception"}}
    stub.faults["msearch"] = first(2, (200, {"responses": [found(0), busy]}))
    assert use(stub) == [[(0, pytest.approx(1.0))]] * 2
    assert requests(stub)["bulk"] == requests(stub)["msearch"] == 3


@pytest.mark.parametrize("partial", [{"timed_out": True}, {"_shards": {"failed": 1}}])
def test_an_answer_of_some_shards_is_none(stub, partial):
    stub.faults["msearch"] = first(1, (200, {"responses": [found(0), found(1, **partial)]}))
    assert use(stub) == [[(0, pytest.approx(1.0))]] * 2
    assert requests(stub)["msearch"] == 2


def test_an_index_made_by_an_attempt_whose_answer_got_lost(stub):
    def fault(number, body):
        if number == 1:
            return "cut"
        name = stub.log[-1][2].strip("/")
        stub.indices[name] = json.loads(body)
        return 400, {"error": {"type": "resource_already_exists_exception"}, "status": 400}

    stub.faults["create"] = fault
    assert use(stub)
    assert stub.indices == {}


@pytest.mark.parametrize("kind", ["bulk", "msearch"])
def test_a_server_that_restarts(stub, kind):
    stopped = []

    def fault(number, body):
        if number == 1:
            stopped.append(threading.Thread(target=lambda: (stub.shutdown(), stub.server_close())))
            stopped[0].start()
            threading.Timer(0.4, lambda: stopped.append(restarted())).start()
            return "cut"
        return None

    def restarted():
        again = start(stub.server_port)
        again.indices, again.rows, again.log = stub.indices, stub.rows, stub.log
        return again

    stub.faults[kind] = fault
    patient = Patience(answer_s=2, attempts=8, first_pause_s=0.1, longest_pause_s=0.3)
    assert use(stub, patience=patient) == [[(0, pytest.approx(1.0))]] * 2
    stopped[1].shutdown()
    stopped[1].server_close()


# --- what does not ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ((503, {}), "status 503 in 4 attempts; run the stage again"),
        ((429, {}), "status 429 in 4 attempts; run the stage again"),
        ("cut", "no connection, or an interrupted one, in 4 attempts; start it or check FEDMEM_ES_URL"),
        ("hang", r"no answer within 0\.5 s in 4 attempts; run the stage again"),
    ],
)
@pytest.mark.parametrize("kind", ["bulk", "msearch"])
def test_for_ever_is_an_error_after_bounded_attempts(stub, kind, fault, said):
    stub.faults[kind] = fault
    doing = {"bulk": "filling", "msearch": "searching"}[kind]
    with pytest.raises(ElasticError, match=rf"at http://127.0.0.1:{stub.server_port}, {doing} fedmem-run-\S+: {said}"):
        use(stub)
    assert requests(stub)[kind] == 4
    assert stub.indices == {}  # what was made is taken away all the same


def test_a_server_that_is_down(stub):
    stub.shutdown()
    stub.server_close()
    with pytest.raises(ElasticError, match=r"asking who it is: no connection, .* in 3 attempts; start it or check"):
        use(stub)


def test_a_server_that_goes_down_for_good_leaves_a_warning_that_names_the_index(stub):
    stub.faults["msearch"] = stub.faults["delete"] = (503, {})
    with (
        pytest.warns(UserWarning, match=r"Later: fedmem elasticsearch remove fedmem-run-texts-[0-9a-f]{16}$"),
        pytest.raises(ElasticError, match="searching"),
    ):
        use(stub)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("7.17.9", "fedmem works with servers 8 and 9"),
        ("10.1.0", "fedmem works with servers 8 and 9"),
        pytest.param(
            "8.15.3", r'pip install "elasticsearch>=8\.15,<9"', marks=pytest.mark.skipif(CLIENT < 9, reason="client 8")
        ),
    ],
)
def test_another_major_stops_at_once_and_says_what_to_install(stub, version, said):  # B49
    stub.version = version
    with pytest.raises(ElasticError, match=rf"it is version {version}, the installed client {CLIENT}\.\d.*{said}"):
        use(stub)
    assert requests(stub) == {"info": 1}


@pytest.mark.skipif(CLIENT > 8, reason="client 9 needs a server 9")
def test_client_8_talks_to_server_9(stub):
    stub.version = "9.1.0"
    assert use(stub)


def test_a_server_8_that_refuses_client_9_by_its_header(stub, monkeypatch):  # B49, as a real one does
    monkeypatch.setattr(elasticsearch, "__version__", (9, 5, 1))
    error = {"type": "media_type_header_exception", "reason": "Invalid media-type value", "root_cause": []}
    stub.faults["info"] = (400, {"error": error, "status": 400})
    with pytest.raises(ElasticError, match=r'does not understand the client, 9\.5\.1; .*"elasticsearch>=8\.15,<9"'):
        use(stub)
    assert requests(stub) == {"info": 1}


def test_no_product_header(stub):
    stub.product = False
    with pytest.raises(ElasticError, match="no header X-Elastic-Product, so it is not Elasticsearch"):
        use(stub)
    assert set(requests(stub)) == {"info"}


@pytest.mark.parametrize(
    ("kind", "fault", "said"),
    [
        ("info", (200, {"hello": 1}), "its answer has no version"),
        ("info", (200, b"<html>"), "SerializationError"),
        ("info", (401, {}), "refuses the credentials; check FEDMEM_ES_USER"),
        ("create", (403, {}), "lacks a privilege; required: cluster privilege monitor"),
        ("health", (200, {"status": "red"}), "its status is red; repair the cluster"),
        ("create", (400, {"error": {"type": "validation_exception", "reason": "max shards"}}), "validation_exception"),
        ("create", (200, {"acknowledged": True, "shards_acknowledged": False}), "status 503 in 4 attempts"),
    ],
)
def test_what_else_a_server_may_say(stub, kind, fault, said):
    stub.faults[kind] = fault
    with pytest.raises(ElasticError, match=said):
        use(stub)
    assert "bulk" not in requests(stub)


def test_a_clause_limit_that_the_owner_lowered(stub):
    stub.settings = {"indices.query.bool.max_clause_count": "512"}
    with pytest.raises(ElasticError, match="it is 512, max_query_terms 1024; set max_query_terms to 512 or less"):
        use(stub)
    assert use(stub, max_query_terms=512)


def test_a_query_with_too_many_clauses_all_the_same(stub):
    cause = {"type": "query_shard_exception", "caused_by": {"type": "too_many_clauses", "reason": "fever, cough"}}
    error = {"type": "search_phase_execution_exception", "root_cause": [cause]}
    stub.faults["msearch"] = (200, {"responses": [found(0), {"status": 400, "error": error}]})
    with pytest.raises(ElasticError, match="too_many_clauses; set max_query_terms lower") as caught:
        use(stub)
    assert "cough" not in str(caught.value)  # private text
    assert requests(stub)["msearch"] == 1


# --- no search on a partial index (B51) ------------------------------------------------------------------------------


def test_two_bad_texts_of_a_thousand_stop_the_stage_and_are_named(stub, monkeypatch):
    monkeypatch.setattr(elasticsearch_engine, "_TEXTS_AT_ONCE", 250)

    def fault(number, body):
        ids = [json.loads(line)["index"]["_id"] for line in body.splitlines()[::2]]
        items = [{"index": {"_id": i, "status": 400 if i in ("7", "90") else 201}} for i in ids]
        for item in (item["index"] for item in items):
            if item["status"] == 400:
                item["error"] = {"type": "document_parsing_exception", "reason": "the private text"}
            else:
                stub.rows.add(item["_id"])
        return 200, {"items": items}

    stub.faults["bulk"] = fault
    rows = r"2 failed, rows 7 \(document_parsing_exception\), 90 \(document_parsing_exception\)"
    with pytest.raises(ElasticError, match=rf"998 of 1000 texts indexed; {rows}; nothing was searched") as caught:
        use(stub, [f"text {i}" for i in range(1000)])
    assert "private" not in str(caught.value)
    assert requests(stub)["bulk"] == 4  # the chunks after the bad one were sent
    assert "msearch" not in requests(stub)
    assert stub.indices == {}


def test_half_of_a_bulk_lost_without_a_word(stub):
    stub.faults["count"] = (200, {"count": 1})
    with pytest.raises(ElasticError, match="1 of 3 texts indexed; nothing was searched"):
        use(stub)
    assert "msearch" not in requests(stub)


# --- an index that vanishes ------------------------------------------------------------------------------------------

GONE = {"status": 404, "error": {"type": "index_not_found_exception", "reason": "no such index"}}


def test_a_vanished_index_is_built_anew_once(stub):
    stub.faults["msearch"] = first(1, (200, {"responses": [GONE, GONE]}))
    assert use(stub) == [[(0, pytest.approx(1.0))]] * 2
    assert requests(stub)["create"] == 2
    names = {path for kind, _, path, *_ in stub.log if kind == "create"}
    assert len(names) == 2


def test_an_index_that_vanishes_again_and_again(stub):
    stub.faults["msearch"] = (404, GONE)
    with pytest.raises(ElasticError, match="vanished, and so did its successor; find out what deletes"):
        use(stub)
    assert requests(stub)["create"] == 2
    assert stub.indices == {}


def test_an_index_that_bulk_has_made_by_itself_is_not_used(stub):
    """A bulk request to an index that is gone makes a new one, with a guessed mapping and without the tag."""
    stub.faults["mapping"] = lambda number, body: (200, {}) if number == 1 else None
    assert use(stub) == [[(0, pytest.approx(1.0))]] * 2
    assert requests(stub)["create"] == 2


# --- deletion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "*", "_all", "fedmem-*", "fedmem-a,other", "other", "-fedmem", "fedmem-not-mine"])
def test_only_what_was_made_here_is_deleted(stub, name):  # B56
    with pytest.raises(ValueError, match="only exact names that this run created"):
        engine(stub).delete(name)
    assert stub.log == []


@pytest.mark.parametrize(
    "name", ["", "*", "_all", "fedmem-*", "fedmem-a,fedmem-b", "other", "-fedmem", "<fedmem-{now}>"]
)
def test_a_leftover_goes_by_its_exact_name_only(stub, name):  # B56
    with pytest.raises(ElasticError, match="this is not a name that fedmem gives; `fedmem elasticsearch leftovers`"):
        orphaned_indices.remove(engine(stub).server, name)
    assert stub.log == []


def test_nothing_to_list_is_an_empty_list_and_no_deletion(stub):
    stub.faults["alias"] = (404, {"error": "alias [fedmem-indices] missing", "status": 404})
    assert orphaned_indices.leftovers(engine(stub).server) == []
    assert requests(stub) == {"alias": 1}


# --- who asks, and secrets --------------------------------------------------------------------------------------------

SECRET = "Corr3ct-h0rse/battery"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "FEDMEM_ES_URL is not set"),
        ({"URL": "localhost:9200"}, "expected http"),
        ({"URL": "ftp://host"}, "expected http"),
        ({"URL": "http://host:port"}, "expected http"),
        ({"URL": f"https://me:{SECRET}@host:9200"}, "put credentials into FEDMEM_ES_USER"),
        ({"URL": f"https://host:9200?key={SECRET}"}, "put credentials into FEDMEM_ES_USER"),
        ({"URL": "https://host", "USER": "me"}, "expected FEDMEM_ES_USER with FEDMEM_ES_PASSWORD"),
        ({"URL": "https://host", "PASSWORD": SECRET}, "expected FEDMEM_ES_USER with FEDMEM_ES_PASSWORD"),
        ({"URL": "https://host", "USER": "me", "PASSWORD": SECRET, "API_KEY": SECRET}, "or FEDMEM_ES_API_KEY"),
        ({"URL": "http://host:9200", "USER": "me", "PASSWORD": SECRET}, "to host in the clear; use https"),
        ({"URL": "http://host:9200", "API_KEY": SECRET}, "to host in the clear; use https"),
        ({"URL": "https://host", "CA": "no-such-file.pem"}, "FEDMEM_ES_CA: there is no file"),
        ({"URL": "http://host:9200", "FINGERPRINT": "ab"}, "need https"),
    ],
)
def test_an_environment_that_will_not_do(environment, said):
    with pytest.raises(ElasticError, match=re.escape(said) if "(" in said else said) as caught:
        Connection.from_environment({f"FEDMEM_ES_{name}": value for name, value in environment.items()})
    assert SECRET not in str(caught.value)


def test_addresses():
    assert Connection("https://host").url == "https://host:443"
    assert Connection("http://[::1]:9200/prefix/").url == "http://[::1]:9200/prefix"
    assert Connection("http://localhost:9200", "me", SECRET).url == "http://localhost:9200"


def test_engines_are_opened_by_name(monkeypatch):
    monkeypatch.delenv("FEDMEM_ES_URL", raising=False)
    assert open_engine("embedded").check()["engine"] == "embedded"
    with pytest.raises(ElasticError, match="FEDMEM_ES_URL is not set"):
        open_engine("elasticsearch")
    with pytest.raises(ValueError, match=r"retriever: got 'lucene'; expected embedded \| elasticsearch"):
        open_engine("lucene")


def test_a_study_that_names_no_server_stops_before_any_stage(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("FEDMEM_ES_URL", raising=False)
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    study = Path(__file__).resolve().parent.parent / "params" / "studies" / "demo.yaml"
    assert main.main(["run", str(study), "--set", "retriever=elasticsearch"]) == 2
    assert "retriever: got 'elasticsearch', but FEDMEM_ES_URL is not set" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_shards_matter_on_a_server_alone():
    assert DetectConfig(shards=5).effective()["shards"] is None
    assert DetectConfig(retriever="elasticsearch", shards=5).effective()["shards"] == 5


@pytest.mark.parametrize(
    ("who", "header"),
    [
        ({"user": "me", "password": SECRET}, "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode()),
        ({"api_key": SECRET}, f"ApiKey {SECRET}"),
    ],
)
def test_credentials_go_to_the_server_and_nowhere_else(stub, who, header, caplog):
    caplog.set_level("DEBUG")
    connection = Connection(f"http://127.0.0.1:{stub.server_port}", **who)
    with Elastic(connection, patience=QUICK).index(TEXTS) as index:
        index.search(["fever"], 1)
    assert all(headers["authorization"] == header for *_, headers, _ in stub.log)
    stub.faults["info"] = (503, {})
    with pytest.raises(ElasticError) as caught:
        Elastic(connection, patience=QUICK).check()
    for text in (repr(connection), str(caught.value), repr(caught.value.__context__), caplog.text):
        assert SECRET not in text
        assert header not in text


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate that its own key has signed, for 127.0.0.1: (file with both, SHA-256 in hexadecimal)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stub")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "stub.pem"
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path, made.fingerprint(hashes.SHA256()).hex()


def test_certificates_are_always_verified(certificate):
    path, fingerprint = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    server = start(context=context)
    url = f"https://127.0.0.1:{server.server_port}"
    try:
        for trusted in ({"ca": str(path)}, {"fingerprint": fingerprint}):
            assert Elastic(Connection(url, "me", SECRET, **trusted), patience=QUICK).check()["health"] == "green"
        asked = len(server.log)
        for not_trusted in ({}, {"fingerprint": "ab" * 32}):
            with pytest.raises(ElasticError, match="certificate is not trusted; name its authority in FEDMEM_ES_CA"):
                Elastic(Connection(url, "me", SECRET, **not_trusted), patience=QUICK).check()
        assert len(server.log) == asked  # no request, so no credentials, reached it
    finally:
        server.shutdown()
        server.server_close()
