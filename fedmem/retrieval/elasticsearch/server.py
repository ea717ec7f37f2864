"""One Elasticsearch server: its address, credentials and time limits, and whether it is suitable.

Address and credentials come only from the environment. No message, representation or log of this module contains a
secret, and none quotes what was sent, which is private text. TLS certificates are always verified. Transient failures
are retried a bounded number of times; any other failure is an error that names the server and says how to go on.
This module does not depend on indices.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import elasticsearch
from elasticsearch import (
    ApiError,
    ConnectionError,
    ConnectionTimeout,
    Elasticsearch,
    NotFoundError,
    SSLError,
    TransportError,
    UnsupportedProductError,
)
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

SERVERS = {8: (8, 9), 9: (9,)}  # major version of the client: major versions of the servers that it can talk to
CLAUSE_LIMIT = "indices.query.bool.max_clause_count"
PASSING = frozenset({429, 502, 503, 504})  # HTTP statuses that are transient
PRIVILEGES = (
    "cluster privilege monitor; on indices fedmem-*: create_index, index, read, view_index_metadata, maintenance, "
    "delete_index, manage (for the alias)"
)


class ElasticError(RuntimeError):
    """The server is unreachable, unsuitable, or refused a request; the message says what to do."""


class Vanished(ElasticError):
    """The server has no such index."""


class Busy(Exception):
    """A part of an answer reports a transient failure, with its HTTP `status`; only for callers of `Server.request`."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Patience(NamedTuple):
    """How long to wait: seconds for one answer, number of attempts, and the pause between them, which doubles."""

    answer_s: float = 60.0
    attempts: int = 7
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0  # 1 + 2 + 4 + 8 + 16 + 30: a minute, enough for a node to restart

    def less(self) -> Self:
        """Return a shorter patience of at most three attempts, for requests that do not justify a minute."""
        return self._replace(attempts=min(3, self.attempts))


@dataclass(frozen=True)
class Connection:
    """Address and credentials of the server.

    url: http or https, host, port (default: the scheme's own), path; no credentials.
    user, password: basic authentication; both or neither.
    api_key: used instead of user and password; without any of them, requests are anonymous.
    ca: file of certificates to trust instead of the system's authorities.
    fingerprint: SHA-256 of the server's own certificate, in hexadecimal.

    Raises ElasticError when values are invalid or contradict each other.
    """

    url: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)
    ca: str | None = None
    fingerprint: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read FEDMEM_ES_URL, _USER and _PASSWORD or _API_KEY, _CA, _FINGERPRINT; an empty variable counts as unset.

        Raises ElasticError when FEDMEM_ES_URL is not set, or as the class does.
        """
        values = {name: environment.get(f"FEDMEM_ES_{name.upper()}") or None for name in cls.__dataclass_fields__}
        if values["url"] is None:
            raise ElasticError("FEDMEM_ES_URL is not set; give the server's address, such as https://localhost:9200")
        return cls(**values)

    def __post_init__(self) -> None:
        try:
            parts, port = urlsplit(self.url), urlsplit(self.url).port
        except ValueError:
            parts, port = urlsplit(""), None  # an invalid port or host fails the check of the host below
        if "@" in self.url or parts.query or parts.fragment:  # the message does not quote it: it may hold a secret
            raise ElasticError(
                "FEDMEM_ES_URL holds more than an address; put credentials into FEDMEM_ES_USER and FEDMEM_ES_PASSWORD, "
                "or FEDMEM_ES_API_KEY"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ElasticError(f"FEDMEM_ES_URL: got {self.url!r}; expected http(s)://HOST:PORT")
        if (self.user is None) != (self.password is None) or (self.user and self.api_key):
            raise ElasticError("expected FEDMEM_ES_USER with FEDMEM_ES_PASSWORD, or FEDMEM_ES_API_KEY, or neither")
        if (self.user or self.api_key) and parts.scheme == "http" and not _is_here(parts.hostname):
            raise ElasticError(f"credentials would go to {parts.hostname} in the clear; use https in FEDMEM_ES_URL")
        if self.ca and not Path(self.ca).is_file():
            raise ElasticError(f"FEDMEM_ES_CA: there is no file {self.ca!r}")
        if parts.scheme == "http" and (self.ca or self.fingerprint):
            raise ElasticError("FEDMEM_ES_CA and FEDMEM_ES_FINGERPRINT need https in FEDMEM_ES_URL")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        port = port or (443 if parts.scheme == "https" else 80)
        # the port is always written: the client refuses an address without one; the dataclass is frozen
        object.__setattr__(self, "url", f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}")

    def client(self, answer_s: float) -> Elasticsearch:
        """Return the official client with a limit of `answer_s` seconds per answer and without its own retries."""
        # the client's own retries have no pause between attempts; `Server.request` retries with pauses
        options: dict[str, Any] = {"request_timeout": answer_s, "max_retries": 0}
        options |= {"basic_auth": (self.user, self.password)} if self.user else {}
        options |= {"api_key": self.api_key} if self.api_key else {}
        options |= {"ca_certs": self.ca} if self.ca else {}
        options |= {"ssl_assert_fingerprint": self.fingerprint} if self.fingerprint else {}
        return Elasticsearch(self.url, **options)


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Server:
    """The server of a connection. Nothing is sent before the first request."""

    def __init__(self, connection: Connection, patience: Patience = Patience()) -> None:  # noqa: B008 - immutable
        self.url, self.patience = connection.url, patience
        self.client = connection.client(patience.answer_s)

    def check(self, max_query_terms: int) -> dict[str, Any]:
        """Check the product, the major versions, the health and the clause limit before a run.

        max_query_terms: longest query, in distinct tokens, that the server must accept, >= 1.
        Returns engine, versions of server and client, and health. Raises ElasticError when the server is unsuitable.
        """
        doing, client = "asking who it is", elasticsearch.__version__[0]
        answer = self.request(doing, self.client.info, self.patience.less())
        try:
            number = answer["version"]["number"]
            major = int(number.split(".")[0])
        except (KeyError, TypeError, AttributeError, ValueError):
            raise self.error(doing, "its answer has no version", "check FEDMEM_ES_URL") from None
        if major not in SERVERS.get(client, ()):
            raise self.error(
                doing, f"it is version {number}, the installed client {_client_version()}", _install(major)
            )
        health = self.request("asking for its health", self.client.cluster.health)["status"]
        if health == "red":
            raise self.error("asking for its health", "its status is red", "repair the cluster or wait, then run again")
        self._check_clauses(max_query_terms)
        return {"engine": "elasticsearch", "server": number, "client": _client_version(), "health": health}

    def _check_clauses(self, wanted: int) -> None:
        """Raise ElasticError when a node's clause limit is below `wanted`."""
        # only a limit that a node's settings override is reported; the server's default is 1,024 or more
        doing, call = f"asking for its {CLAUSE_LIMIT}", self.client.nodes.info
        nodes = self.request(doing, call, metric="settings", flat_settings=True)["nodes"]
        for limit in (node.get("settings", {}).get(CLAUSE_LIMIT) for node in nodes.values()):
            if limit is not None and int(limit) < wanted:
                advice = f"set max_query_terms to {limit} or less, or raise the server's setting"
                raise self.error(doing, f"it is {limit}, max_query_terms {wanted}", advice)

    def request(
        self, doing: str, call: Callable[..., Any], patience: Patience | None = None, /, **arguments: Any
    ) -> Any:
        """Return what `call` returns; transient failures are retried.

        doing: what the request does, for error messages ("deleting fedmem-…").
        call: a method of the client. arguments: its keyword arguments.
        patience: time limits and attempts; None: the server's own.

        Raises Vanished when the server answers "not found", and ElasticError for every other failure.
        """
        patience = patience or self.patience
        again = Retrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_attempt(patience.attempts),
            wait=wait_exponential(patience.first_pause_s, patience.longest_pause_s, min=patience.first_pause_s),
            reraise=True,
        )
        try:
            return again(call, **arguments)
        except NotFoundError as error:
            raise self.error(
                doing, f"not found ({error.message})", "check the name and FEDMEM_ES_URL", Vanished
            ) from None
        except (ApiError, TransportError, Busy) as error:
            # `from None`: the original exception quotes the request, which is private text
            raise self.error(doing, *self._explained(error, patience)) from None

    def error(self, doing: str, problem: str, advice: str, kind: type[ElasticError] = ElasticError) -> ElasticError:
        """Return (not raise) an error that names the server.

        doing: what was requested. problem: what went wrong. advice: what to do. kind: class of the error.
        """
        return kind(f"Elasticsearch at {self.url}, {doing}: {problem}; {advice}")

    def _explained(self, error: Exception, patience: Patience) -> tuple[str, str]:
        """Return (what happened, what to do), quoting only HTTP statuses and kinds of error."""
        tries, again = f"in {patience.attempts} attempts", "run the stage again: it rebuilds its indices"
        status = error.status if isinstance(error, Busy) else error.meta.status if isinstance(error, ApiError) else None
        # before the statuses: this one is an ApiError whose status may be 200
        if isinstance(error, UnsupportedProductError):
            return (
                "no header X-Elastic-Product, so it is not Elasticsearch",
                "check FEDMEM_ES_URL; forks are not supported",
            )
        if isinstance(error, ConnectionTimeout):
            return f"no answer within {patience.answer_s:g} s {tries}", again
        # SSLError before ConnectionError, its base class
        if isinstance(error, SSLError):
            advice = "name its authority in FEDMEM_ES_CA or its certificate in FEDMEM_ES_FINGERPRINT"
            return "its certificate is not trusted", advice + "; verification is never switched off"
        if isinstance(error, ConnectionError):
            return f"no connection, or an interrupted one, {tries}", f"start it or check FEDMEM_ES_URL, then {again}"
        if status in PASSING:
            return f"status {status} {tries}", again
        if status == 401:
            return "it refuses the credentials", "check FEDMEM_ES_USER and FEDMEM_ES_PASSWORD, or FEDMEM_ES_API_KEY"
        if status == 403:
            return "the user lacks a privilege", f"required: {PRIVILEGES}"
        kinds = error_kinds(error.body) if isinstance(error, ApiError) else [type(error).__name__]
        # the answer of a server that is one major version older than the client
        if "media_type_header_exception" in kinds:
            return f"it does not understand the client, {_client_version()}", _install(elasticsearch.__version__[0] - 1)
        return f"status {status}, {', '.join(kinds) or 'no reason given'}", "see the server's log"


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, ApiError):
        return error.meta.status in PASSING and not isinstance(error, UnsupportedProductError)
    return isinstance(error, ConnectionTimeout | ConnectionError | Busy) and not isinstance(error, SSLError)


def error_kinds(body: Any) -> list[str]:
    """Return the kinds of error in an answer, outermost first, without its reasons, which quote what was sent."""
    if isinstance(body, list):
        return list(dict.fromkeys(kind for part in body for kind in error_kinds(part)))
    if not isinstance(body, dict):
        return []
    own = [body["type"]] if isinstance(body.get("type"), str) else []
    inner = [
        kind
        for name in ("error", "root_cause", "caused_by", "failed_shards", "reason")
        for kind in error_kinds(body.get(name))
    ]
    return list(dict.fromkeys(own + inner))


def _client_version() -> str:
    return ".".join(map(str, elasticsearch.__version__))


def _install(server: int) -> str:
    clients = [client for client, servers in SERVERS.items() if server in servers]
    if not clients:
        return f"fedmem works with servers {' and '.join(map(str, SERVERS))}"
    return f'install a client for it: pip install "elasticsearch>={clients[0]}.15,<{clients[0] + 1}"'
