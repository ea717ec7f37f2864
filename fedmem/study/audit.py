"""An audit of a model that was trained elsewhere: a study of one run, made from the model and a file for each client.

Nothing is trained here, and every row of the clients' files counts as one that the model was trained on; texts that it
never saw, where there are any, are the control. What could fail later, a file, the model, its context, is looked at
before anything runs. This module makes the study; the notebooks do the work, as in any other.
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
from fedmem.corpus import columns, files
from fedmem.corpus.columns import SCHEMA, CorpusError
from fedmem.corpus.files import READERS
from fedmem.corpus.loading import load_corpus
from fedmem.generate import probes
from fedmem.generate.probes import GenerationError
from fedmem.machine.paths import digest_of, file_digest, results_root
from fedmem.models import config_files
from fedmem.models.config_files import ModelError
from fedmem.models.examples import template_start
from fedmem.models.loading import load_tokenizer
from fedmem.partition import dealing, duplicates
from fedmem.partition.partitioners import PartitionError
from fedmem.results.identity import outside_digests
from fedmem.results.studies import check_study_name
from fedmem.study import preflight
from fedmem.study.jobs import Run, Study, jobs_of
from fedmem.study.loading import with_absolute_paths

N_PREFIXES = 1000  # of each client, at most, unless said otherwise
MAX_TOKENS = 2048  # of a row whose perplexity is measured, or the model's context where that is shorter
TEXT_COLUMN = "text"  # what a file of mere texts often calls its input
TOKENIZER = ("tokenizer*", "chat_template*", "special_tokens*", "vocab*", "merges*", "added_tokens*")  # if it has one
SEEN = "held-out texts equal training texts of the clients"
NAMED_CLIENTS = 12  # in the note; the partition's tables have all
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
    preset or a hub id. clients: a file for each client, in the order of their numbers. heldout: one file whose rows are
    dealt to all clients, or one for each. overrides: {parameter: value} of any stage but what the files decide.
    plain_text: go on although the tokenizer has no chat template, with prompts that are beginnings of texts.

    Each client is probed with as many prefixes as every client has rows for, N_PREFIXES at most. Raises ConfigError
    that says what is wrong, where, and what is allowed; nothing has been executed then.
    """
    overrides = with_absolute_paths(overrides or {})
    for key in overrides:
        if key in FIXED:
            raise ConfigError(f"--set {key}: an audit takes it from {FIXED[key]}; allowed are all other parameters")
    name = name or f"audit-{Path(model).name}"
    check_study_name(name, "--name")
    try:
        values, origin = _values(clients, heldout, overrides)
        whole = _whole(model)
        _check_model(model, whole)
        tokenizer = load_tokenizer(whole)
        _check_template(model, tokenizer, plain_text)
        configs = create_all(values | {"model": whole}, origin)
        context = config_files.context_tokens(config_files.read_config(whole) or {})
        _check_context(model, context, tokenizer, configs["generate"])
        longest = {"max_tokens": min(context or MAX_TOKENS, MAX_TOKENS)}
        rows = _rows(configs["partition"])
        n_prefixes, why = _n_prefixes(rows, tokenizer, configs["generate"], bool(heldout))
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
    """(flat parameters, where each came from), the model apart and sizes as wide as can be: checked all together.

    The files are there and differ; no row is read before the parameters have passed.
    """
    given = _files("--client", clients)
    apart = _files("--heldout", heldout)
    if not given:
        raise ConfigError("--client: got nothing; allowed is a file for each client, such as --client ward_a.jsonl")
    if len(apart) not in (0, 1, len(given)):
        raise ConfigError(
            f"--heldout: got {len(apart)} files; allowed is one for all clients, or one for each of {len(given)}"
        )
    _check_different(given, apart)
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
    """The files of an option as absolute paths; ConfigError for one that is not there, a folder, or of another kind."""
    found = []
    for one in given:
        path, kinds = Path(one).expanduser(), ", ".join(READERS)
        if path.is_dir():
            raise ConfigError(f"{option} {one}: is a folder; allowed is a file ({kinds}), one a client")
        if not path.is_file():
            raise ConfigError(f"{option} {one}: there is no such file (looked from {Path.cwd()}); allowed is {kinds}")
        found.append(path.resolve())
    return files.files_of(found) if found else []


def _check_different(given: list[Path], apart: list[Path]) -> None:
    """No file twice, under another name neither: a text of two clients would pass for a leak between them."""
    seen: dict[str, Path] = {}
    for file in [*given, *apart]:
        other = seen.setdefault(file_digest(file), file)
        if other != file or [*given, *apart].count(file) > 1:
            why = "what a client trained on is no control" if file in apart else "each client has texts of its own"
            raise ConfigError(f"{file}: holds the same bytes as {other}; {why}: give each file once")


def _column_map(given: list[Path], encoding: str) -> dict[str, str | None]:
    """The files' own columns by their first rows: ours where all files have them, `text` for input, null for others."""
    shared: set[str] | None = None
    for file in given:
        first = next(files.read(file, encoding), None)
        if first is None:
            raise ConfigError(f"{file}: holds no rows; expected one text a row, in a column input or {TEXT_COLUMN}")
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
    """The model as notebooks load it: itself; of a folder of adapters, the base with the adapters merged in.

    That is made once, in `results/models/`, named by the digest of the adapters and of the base: of its files, where
    they are here, else of its name. Of two audits that make the same one, the later takes what is there.
    """
    folder = Path(model).expanduser()
    if not folder.exists() and (folder.is_absolute() or model.startswith((".", "~"))):
        raise ConfigError(f"--model {model}: there is no such folder; allowed is a folder, a preset or a hub id")
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
    """Raise ConfigError for a model (its base, for adapters) that cannot be loaded here, before loading is tried."""
    if said := [problem.message for problem in preflight.model_problems(name)]:
        base = "" if name in (model, str(Path(model).expanduser().resolve())) else "the base of its adapters: "
        raise ConfigError(f"--model {model}: {base}{said[0]}")


def _base(model: str, adapters: Path) -> str:
    """The name of the model that adapters were trained on, as their adapter_config.json has it."""
    try:
        settings = json.loads(adapters.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"--model {model}: adapter_config.json in its folder is not JSON: {error}") from None
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not isinstance(base, str) or not base:
        raise ConfigError(f"--model {model}: adapter_config.json names no base_model_name_or_path: write it there")
    return base


def _merge(base: str, adapters: Path, whole: Path) -> None:
    """Write the base with the adapters merged in, and the adapters' tokenizer if they have one, as `whole`."""
    from fedmem.models.loading import save_merged

    whole.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=whole.parent, prefix=".") as unfinished:
        made = Path(unfinished) / "model"
        try:
            save_merged(base, adapters, made)
        except (AttributeError, KeyError, TypeError) as error:  # peft takes the file's values as they are
            raise ConfigError(
                f"--model {adapters}: adapter_config.json in its folder cannot be used ({type(error).__name__}: "
                f"{error}); allowed is what save_pretrained of a peft model wrote"
            ) from error
        for file in (one for pattern in TOKENIZER for one in adapters.glob(pattern)):
            shutil.copy(file, made)
        try:
            made.rename(whole)
        except OSError:
            if not whole.is_dir():  # else another audit has put the same there meanwhile
                raise


def _check_template(model: str, tokenizer, plain_text: bool) -> None:
    if tokenizer.chat_template and plain_text:
        raise ConfigError(
            f"--plain-text: the tokenizer of {model} has a chat template, and prompts follow it; to probe without, "
            "give a copy of the model's folder whose tokenizer has none"
        )
    if not tokenizer.chat_template and not plain_text:
        start = template_start(tokenizer)
        after = f"{start!r} and " if start else ""
        raise ConfigError(
            f"--model {model}: its tokenizer has no chat template, so a prompt would be {after}the beginning of a "
            "text, and nothing else. That is right for a model that was trained on plain text: then say --plain-text. "
            "If it was trained on conversations, save that training's template with it (tokenizer.chat_template)"
        )


def _check_context(model: str, context: int | None, tokenizer, generate: StageConfig) -> None:
    """Raise ConfigError where template, prefix and continuation do not fit into the model's context."""
    start = len(tokenizer(template_start(tokenizer), add_special_tokens=False)["input_ids"])
    prompt = start + generate.prefix_tokens
    if context is not None and prompt + generate.max_new_tokens > context:
        left = context - prompt
        advice = f"--set max_new_tokens={left} at most" if left > 0 else "a lower prefix_tokens"
        raise ConfigError(
            f"--model {model}: its context holds {context} tokens, and {start} of the template, prefix_tokens = "
            f"{generate.prefix_tokens} and max_new_tokens = {generate.max_new_tokens} make {prompt} + "
            f"{generate.max_new_tokens}; allowed is {advice}"
        )


def _rows(config: StageConfig) -> pd.DataFrame:
    """The partition that notebook 1 will make."""
    texts = load_corpus(config.corpus, config.task, **config.source)
    quotas = dealing.quotas(config.split_rows, config.n_clients, config.skew)
    dealt_rows = dealing.assign(
        texts, config.partitioner, quotas, config.partition_seed, unit=config.unit, client_groups=config.client_groups
    )
    if config.heldout_path:
        apart = load_corpus("file", config.task, **config.heldout_source)
        one_each = isinstance(config.heldout_path, list)
        dealt_rows = dealing.add_heldout(dealt_rows, apart, config.n_clients, config.partition_seed, one_each)
    if config.duplicates == "drop":
        dealt_rows = duplicates.find(dealt_rows, config.near_duplicate).drop(dealt_rows)
    return dealing.split(dealt_rows, quotas)


def _n_prefixes(rows: pd.DataFrame, tokenizer, generate: StageConfig, control: bool) -> tuple[int, str]:
    """(prefixes of each client, why not more): as many as each has rows for, and held-out rows where there are any."""
    texts = probes.split_inputs(rows, tokenizer, generate.prefix_tokens, generate.min_input_tokens)
    least = generate.min_input_tokens or generate.prefix_tokens + 20
    limit = generate.n_prefixes
    why = "as asked for" if limit != N_PREFIXES else "the most that an audit takes by itself"
    clients = sorted(rows["client"].unique())
    kinds = ("rows", "held-out rows") if control else ("rows",)
    for what, drawn in zip(kinds, probes.drawable(texts, generate.sample_seed), strict=False):
        had = drawn["client"].value_counts().reindex(clients, fill_value=0)
        if had.min() < limit:
            limit = int(had.min())
            why = f"client {had.idxmin()} has no more different {what} of at least {least} tokens"
            if what == "held-out rows":
                why += _seen_in_training(texts, int(had.idxmin()))
    if limit < 1 and why.endswith(SEEN):
        raise ConfigError(f"--heldout: {why}: no control is left; give texts that the model never saw, or leave it out")
    if limit < 1:
        raise ConfigError(
            f"{why}, so there is nothing to ask: a prefix of prefix_tokens = {generate.prefix_tokens} tokens and a "
            "rest are needed of each; give longer texts, or lower it, for example --set prefix_tokens=10"
        )
    probes.sample(texts, limit, generate.n_suffixes, generate.sample_seed)  # raises where n_suffixes asks for more
    return limit, f"{limit} prefixes of each client: {why}"


def _seen_in_training(texts: pd.DataFrame, client: int) -> str:
    """How many of a client's held-out texts cannot be a control, for clients trained on them; empty for none."""
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
            f"The control are {heldout:,} held-out rows that were given."
            if control
            else "There is no held-out control: no texts were given that the model never saw, so nothing here says how "
            "much of what matches is chance.",
        ]
    )
