"""An audit of a model that was trained elsewhere: a study of one run, made from the model and a file for each client.

Nothing is trained here. Every row of the clients' files counts as a training row of the model; held-out texts, which
the model never saw, are the control if they are given. Files, model and context length are checked before anything
runs. This module only builds the study; the notebooks execute it, like any other study.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedmem.config.parameter import ConfigError, StageConfig
from fedmem.config.stages import TrainConfig, create_all
from fedmem.config.vocabulary import SCHEMA
from fedmem.corpus import columns, files
from fedmem.corpus.columns import CorpusError
from fedmem.corpus.files import READERS
from fedmem.corpus.loading import load_corpus
from fedmem.generate import probes
from fedmem.generate.probes import GenerationError
from fedmem.machine.paths import digest_of, file_digest, results_root
from fedmem.models import config_files
from fedmem.models.config_files import ModelError
from fedmem.models.examples import template_start
from fedmem.models.loading import load_tokenizer
from fedmem.partition.dealing import deal
from fedmem.partition.partitioners import PartitionError
from fedmem.results.identity import outside_digests
from fedmem.results.studies import check_study_name
from fedmem.study import preflight
from fedmem.study.jobs import Run, Study, jobs_of
from fedmem.study.loading import with_absolute_paths

N_PREFIXES = 1000  # default limit per client
MAX_TOKENS = 2048  # of a row whose perplexity is measured; a shorter context of the model lowers it
TEXT_COLUMN = "text"  # the usual name of the only column of a data set of plain texts
# Files of a tokenizer in a folder of adapters: a training that added tokens or a template saves its own there.
TOKENIZER = ("tokenizer*", "chat_template*", "special_tokens*", "vocab*", "merges*", "added_tokens*")
SEEN = "held-out texts equal training texts of the clients"
NAMED_CLIENTS = 12  # in the note; the partition's tables list all of them
# Parameters that an audit sets itself, and the option each value comes from ("nothing": it is fixed).
FIXED = {
    "model": "--model", "corpus": "--client", "corpus_path": "--client", "client_groups": "--client",
    "n_clients": "--client", "train_rows": "--client", "heldout_path": "--heldout", "heldout_rows": "--heldout",
    "test_rows": "nothing", "partitioner": "nothing", "algorithm": "nothing", "checkpoint_round": "nothing",
}  # fmt: skip


def audit_study(
    model: str,
    clients: Sequence[str | Path],
    heldout: Sequence[str | Path] = (),
    name: str | None = None,
    overrides: dict[str, Any] | None = None,
    plain_text: bool = False,
) -> Study:
    """Return the study of an audit: one run that trains nothing.

    model: a folder that `save_pretrained` wrote (with its tokenizer), a folder of adapters that names its base, a
        preset or a hub id.
    clients: one file per client, at least one; the position of a file is the client's number.
    heldout: one file whose rows are divided among all clients, or one file per client; empty: no control.
    name: the study's name; None: "audit-" and the model's name.
    overrides: {parameter: value} of any stage, except the parameters in FIXED.
    plain_text: accept a tokenizer without a chat template; prompts are then beginnings of texts.

    Every client is probed with the same number of prefixes: as many as the smallest client has rows for, N_PREFIXES at
    most. Raises ConfigError when an option, a file, the model or a parameter is not valid, before any stage runs.
    """
    overrides = with_absolute_paths(overrides or {})
    for key in overrides:
        if key in FIXED:
            raise ConfigError(f"--set {key}: an audit takes it from {FIXED[key]}; expected any other parameter")
    name = name or f"audit-{Path(model).name}"
    check_study_name(name, "--name")
    try:
        values, origin = _values(clients, heldout, overrides)
        whole = _whole(model)
        _check_model(model, whole)
        tokenizer = load_tokenizer(whole)
        _check_template(model, tokenizer, plain_text)
        configs = create_all(values | {"model": whole}, origin)
        # rows are read only with valid parameters, and n_prefixes depends on the rows: hence create_all twice
        context = config_files.context_tokens(config_files.read_config(whole) or {})
        _check_context(model, context, tokenizer, configs["generate"])
        longest = {"max_tokens": min(context or MAX_TOKENS, MAX_TOKENS)}
        rows = _rows(configs["partition"])
        n_prefixes, why = _n_prefixes(rows, tokenizer, configs["generate"], bool(heldout))
        # overrides after `longest`: a max_tokens of the user wins over the model's context
        values = values | longest | overrides | {"model": whole, "n_prefixes": n_prefixes}
        configs = create_all(values, origin)
    except (CorpusError, PartitionError, ModelError, GenerationError) as error:
        raise ConfigError(str(error)) from None
    run = Run("audit", configs, jobs_of(configs, {}))
    title = f"What does {Path(model).name} give back of its clients' texts?"
    return Study(name, title, _note(rows, values["client_groups"], why, tokenizer, bool(heldout)), (run,))


def _values(
    clients: Sequence[str | Path], heldout: Sequence[str | Path], overrides: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (flat parameters without the model, the origin of each), all checked together.

    The files are checked first: they exist and differ. Their rows are read only after the parameters are valid.
    """
    given = _files("--client", clients)
    apart = _files("--heldout", heldout)
    if not given:
        raise ConfigError("--client: got nothing; expected one file for each client, such as --client ward_a.jsonl")
    if len(apart) not in (0, 1, len(given)):
        raise ConfigError(
            f"--heldout: got {len(apart)} files; expected one for all clients, or one for each of {len(given)}"
        )
    _check_different(given, apart)
    # max_tokens is larger than any row until the model's context is known
    fixed = {
        "task": "qa", "corpus": "file", "corpus_path": [str(file) for file in given], "partitioner": "natural",
        "client_groups": files.names_of(given), "n_clients": len(given), "train_rows": 1.0, "test_rows": 0,
        "heldout_rows": 0, "algorithm": "none", "utility_rows": 0, "n_prefixes": N_PREFIXES, "max_tokens": 10**9,
    }  # fmt: skip
    if apart:
        fixed["heldout_path"] = [str(file) for file in apart] if len(apart) == len(given) else str(apart[0])
    values, origin = fixed | overrides, dict.fromkeys(overrides, "--set")
    encoding = create_all(values, origin)["partition"].corpus_encoding
    found = {} if "column_map" in overrides else {"column_map": _column_map([*given, *apart], encoding)}
    return values | found, origin


def _files(option: str, given: Sequence[str | Path]) -> list[Path]:
    """Return the files of an option as absolute paths; raises ConfigError for a missing file or an unknown kind."""
    found = []
    for one in given:
        path, kinds = Path(one).expanduser(), ", ".join(READERS)
        if path.is_dir():
            raise ConfigError(f"{option} {one}: is a folder; expected a file ({kinds}), one per client")
        if not path.is_file():
            raise ConfigError(f"{option} {one}: there is no such file (searched from {Path.cwd()}); expected {kinds}")
        found.append(path.resolve())
    return files.files_of(found) if found else []


def _check_different(given: list[Path], apart: list[Path]) -> None:
    """Raise ConfigError when two files have the same content, under whatever names."""
    # a text that two clients hold would be counted as a leak from one to the other
    seen: dict[str, Path] = {}
    for file in [*given, *apart]:
        other = seen.setdefault(file_digest(file), file)
        if other != file or [*given, *apart].count(file) > 1:
            why = "training texts cannot be the control" if file in apart else "each client has texts of its own"
            raise ConfigError(f"{file}: holds the same bytes as {other}; {why}: give each file once")


def _column_map(given: list[Path], encoding: str) -> dict[str, str | None]:
    """Return a column_map for the files: keys of SCHEMA that all of them have, `text` as input, null for the rest."""
    # the first row of each file is enough to find its columns; `corpora` checks every row later
    shared: set[str] | None = None
    for file in given:
        first = next(files.read(file, encoding), None)
        if first is None:
            raise ConfigError(f"{file}: holds no rows; expected one text per row, in a column input or {TEXT_COLUMN}")
        place, row = first
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: holds {columns.kind_of_value(row)}, not an object such as {{'input': '…'}}")
        if not row.keys() & {"input", TEXT_COLUMN}:
            raise ConfigError(
                f"{place}: no column 'input' or '{TEXT_COLUMN}'; found {columns.shown_names(row)}; say which column "
                "holds the texts, for example --set 'column_map={input: note}'"
            )
        shared = set(row) if shared is None else shared & set(row)
    names = {key: key if key in shared else None for key in SCHEMA if key != "group"}
    if names["input"] is None:
        if TEXT_COLUMN not in shared:
            raise ConfigError(f"{given[0]}: some files call their texts 'input', others '{TEXT_COLUMN}'; rename one")
        names["input"] = TEXT_COLUMN
    return names | {"group": None}


def _whole(model: str) -> str:
    """Return the model that the notebooks load: `model` itself, or, for a folder of adapters, the merged model.

    A merged model is built once, in `results/models/`. Its name contains the digest of the adapters and of the base:
    of the base's files if they are local, else of its name. A second audit of the same adapters reuses it.
    """
    folder = Path(model).expanduser()
    if not folder.exists() and (folder.is_absolute() or model.startswith((".", "~"))):
        raise ConfigError(f"--model {model}: there is no such folder; expected a folder, a preset or a hub id")
    adapters = folder / "adapter_config.json"
    if not adapters.is_file() or (folder / "config.json").is_file():
        return str(folder.resolve()) if folder.is_dir() else model
    base = _base(model, adapters)
    try:
        of_base = outside_digests(TrainConfig(model=base)).get("model", base)
    except ConfigError as error:
        raise ConfigError(f"--model {model}: the base that its adapter_config.json names: {error}") from None
    whole = results_root() / "models" / f"{folder.name}-{digest_of([file_digest(folder), of_base])[:8]}"
    if not whole.is_dir():
        _check_model(model, base)
        _merge(base, folder, whole)
    return str(whole)


def _check_model(model: str, name: str) -> None:
    """Raise ConfigError when a model (or the base of its adapters) cannot be loaded here, before loading is tried."""
    if messages := [problem.message for problem in preflight.model_problems(name)]:
        base = "" if name in (model, str(Path(model).expanduser().resolve())) else "the base of its adapters: "
        raise ConfigError(f"--model {model}: {base}{messages[0]}")


def _base(model: str, adapters: Path) -> str:
    """Return the name of the adapters' base model, from their adapter_config.json."""
    try:
        settings = json.loads(adapters.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"--model {model}: adapter_config.json in its folder is not JSON: {error}") from None
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not isinstance(base, str) or not base:
        raise ConfigError(f"--model {model}: adapter_config.json names no base_model_name_or_path: write it there")
    return base


def _merge(base: str, adapters: Path, whole: Path) -> None:
    """Merge the adapters into the base; write the result, and the adapters' tokenizer if they have one, to `whole`."""
    from fedmem.models.loading import (
        save_merged,  # imports peft, which takes a second and which other audits do not need
    )

    whole.parent.mkdir(parents=True, exist_ok=True)
    # written next to the target and renamed, so that an interrupted merge never passes for a finished one
    with tempfile.TemporaryDirectory(dir=whole.parent, prefix=".") as unfinished:
        made = Path(unfinished) / "model"
        try:
            save_merged(base, adapters, made)
        except (AttributeError, KeyError, TypeError) as error:  # peft does not check the file's values
            raise ConfigError(
                f"--model {adapters}: adapter_config.json in its folder cannot be used ({type(error).__name__}: "
                f"{error}); expected the file that save_pretrained of a peft model wrote"
            ) from error
        for file in (one for pattern in TOKENIZER for one in adapters.glob(pattern)):
            shutil.copy(file, made)
        try:
            made.rename(whole)
        except OSError:
            # a folder there means that another audit has just built the same model
            if not whole.is_dir():
                raise


def _check_template(model: str, tokenizer, plain_text: bool) -> None:
    if tokenizer.chat_template and plain_text:
        raise ConfigError(
            f"--plain-text: the tokenizer of {model} has a chat template, and prompts follow it; to probe without it, "
            "give a copy of the model's folder whose tokenizer has none"
        )
    if not tokenizer.chat_template and not plain_text:
        start = template_start(tokenizer)
        after = f"{start!r} and " if start else ""
        raise ConfigError(
            f"--model {model}: its tokenizer has no chat template, so a prompt would be {after}the beginning of a "
            "text, and nothing else. That is right for a model that was trained on plain text: then pass --plain-text. "
            "If it was trained on conversations, save that training's template with it (tokenizer.chat_template)"
        )


def _check_context(model: str, context: int | None, tokenizer, generate: StageConfig) -> None:
    """Raise ConfigError when template, prefix and continuation do not fit into the model's context."""
    start = len(tokenizer(template_start(tokenizer), add_special_tokens=False)["input_ids"])
    if reason := generate.beyond_context(context, start + generate.prefix_tokens):
        raise ConfigError(f"--model {model}: {reason}, with --set")


def _rows(config: StageConfig) -> pd.DataFrame:
    """Return the partition that notebook 1 will build."""
    texts = load_corpus(config.corpus, config.task, **config.source)
    apart = load_corpus("file", config.task, **config.heldout_source) if config.heldout_path else None
    return deal(config, texts, apart)


def _n_prefixes(rows: pd.DataFrame, tokenizer, generate: StageConfig, control: bool) -> tuple[int, str]:
    """Return (prefixes of each client, why not more): as many as every client has rows and, if given, held-out rows."""
    # drawn with generation's own functions: only rows that differ and are long enough can be sampled
    texts = probes.split_inputs(rows, tokenizer, generate)
    limit = generate.n_prefixes
    why = "as requested" if limit != N_PREFIXES else "the default limit of an audit"
    clients = sorted(rows["client"].unique())
    kinds = ("rows", "held-out rows") if control else ("rows",)
    for what, drawn in zip(kinds, probes.drawable(texts, generate.sample_seed), strict=False):
        had = drawn["client"].value_counts().reindex(clients, fill_value=0)
        if had.min() < limit:
            limit = int(had.min())
            why = f"client {had.idxmin()} has no more different {what} of at least {generate.least_input_tokens} tokens"
            if what == "held-out rows":
                why += _seen_in_training(texts, int(had.idxmin()))
    if limit < 1 and why.endswith(SEEN):
        raise ConfigError(f"--heldout: {why}: no control is left; give texts that the model never saw, or leave it out")
    if limit < 1:
        raise ConfigError(
            f"{why}, so there is nothing to probe: each text needs a prefix of prefix_tokens = "
            f"{generate.prefix_tokens} tokens and a rest; give longer texts, or lower it, for example --set "
            "prefix_tokens=10"
        )
    # the sample is discarded: the call raises now, not hours later, when n_suffixes is more than the rows allow
    probes.sample(texts, limit, generate.n_suffixes, generate.sample_seed)
    return limit, f"{limit} prefixes of each client: {why}"


def _seen_in_training(texts: pd.DataFrame, client: int) -> str:
    """Say how many of a client's held-out texts are also training texts, and so no control; empty if there are none."""
    mine = texts[texts["long_enough"] & (texts["split"] == "heldout") & (texts["client"] == client)]
    seen = int(mine["input"].isin(texts.loc[texts["split"] == "train", "input"]).sum())
    return f": {seen} of its {len(mine)} {SEEN}" if seen else ""


def _note(rows: pd.DataFrame, names: list[str], why: str, tokenizer, control: bool) -> str:
    sizes = rows[rows["split"] == "train"]["client"].value_counts().sort_index()
    listed = [f"{client} {name} ({sizes[client]:,} rows)" for client, name in enumerate(names)]
    more = f", and {len(listed) - NAMED_CLIENTS} more" if len(listed) > NAMED_CLIENTS else ""
    heldout = int((rows["split"] == "heldout").sum())
    return " ".join(
        [
            "An audit: the model was trained elsewhere, and all rows of the clients' files count as rows that it was",
            f"trained on. Clients: {', '.join(listed[:NAMED_CLIENTS])}{more}. {why[0].upper()}{why[1:]}.",
            "Prompts follow the tokenizer's chat template."
            if tokenizer.chat_template
            else "The tokenizer has no chat template: prompts are beginnings of texts.",
            f"The control is a set of {heldout:,} held-out rows that were given."
            if control
            else "There is no held-out control: no texts were given that the model never saw, so the share of matches "
            "by chance is unknown.",
        ]
    )
