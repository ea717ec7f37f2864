"""Finished stages without work: a study's folders as its notebooks would leave them, with matches that are drawn.

The tables of the analysis are made of them by the real functions; nothing is trained, generated or compared.
"""

import json

import numpy as np
import pandas as pd

from fedmem.analyze import exclusions, ratios
from fedmem.analyze.counting import Counts
from fedmem.results import studies
from fedmem.train.history import UTILITY

PROMPTS = 20  # of each client


def finish(study, chance):
    """Write every stage folder of a study and its study.json.

    chance: run's parameters → (share of a client's prefixes that match its own text, share that match each other's).
    """
    study_folder = studies.study_folder(study.name)
    study_folder.mkdir(parents=True)
    (study_folder / "study.json").write_text(json.dumps(study.describe()))
    for run in study.runs:
        parameters = {name: value for config in run.configs.values() for name, value in config.model_dump().items()}
        made = _tables(parameters, *chance(parameters))
        for stage, job in run.jobs.items():
            if not job.folder.is_dir():
                _publish(job, made[stage])


def _publish(job, tables):
    job.folder.mkdir(parents=True)
    for name, table in tables.items():
        table.to_parquet(job.folder / f"{name}.parquet", index=False)
    parents = [{"stage": job.parent.stage, "folder": f"{job.parent.stage}/{job.parent.folder.name}",
                "identity": job.parent.identity, "files": ""}] if job.parent else []  # fmt: skip
    manifest = {
        "stage": job.stage, "identity": job.identity, "parameters": job.config.model_dump(), "parents": parents,
        "files": {f"{name}.parquet": "" for name in tables}, "sizes": {}, "code": "", "finished": "2026",
        "device": "cpu", "seconds": 1.5,
    }  # fmt: skip
    (job.folder / "manifest.json").write_text(json.dumps(manifest))


def _tables(parameters, own, others):
    clients = range(parameters["n_clients"])
    ids = [(j, i) for j in clients for i in range(PROMPTS)]
    words = " ".join(f"w{n}" for n in range(30))
    rows = pd.DataFrame([(f"r{j}-{i}", j, "train", f"{words} {j} {i}") for j, i in ids])
    rows.columns = ["row_id", "client", "split", "input"]
    prefixes = pd.DataFrame([(f"p{j}-{i}", j, f"r{j}-{i}", words) for j, i in ids])
    prefixes.columns = ["prefix_id", "client", "row_id", "continuation"]
    sides = [(f"{name}{j}-{i}", j, f"r{j}-{i}", member, words) for name, member in (("s", True), ("h", False))
             for j, i in ids]  # fmt: skip
    suffixes = pd.DataFrame(sides, columns=["suffix_id", "client", "row_id", "member", "suffix"])
    found = [
        (f"p{j}-{i}", j, f"s{k}-{i}", k, True, "verbatim", [[0, 60, 0, 60]])
        for j, i in ids for k in clients if i < round(PROMPTS * (own if j == k else others))
    ]  # fmt: skip
    columns = ["prefix_id", "prefix_client", "suffix_id", "suffix_client", "member", "kind", "detections"]
    matches = pd.DataFrame(found, columns=columns).astype({"member": bool})
    matches = matches.assign(score=np.nan, identical_sentence=False, matched_chars=60)
    sizes = pd.DataFrame({"client": clients, "n_train": PROMPTS})
    counts = Counts(matches, prefixes, sizes, suffixes)
    marked = matches.assign(own=False, shared=False, incoherent=False)
    return {
        "partition": {"rows": rows},
        "train": {"curves": _curves(parameters, clients), "utility": _utility(parameters, own)},
        "generate": {"prefixes": prefixes, "suffixes": suffixes},
        "detect": {"matches": matches},
        "analyze": {
            "cells": ratios.cells(counts),
            "summary": ratios.summary(counts),
            "kinds": ratios.kinds(counts),
            "exclusions": exclusions.summaries(counts, marked),
        },
    }


def _curves(parameters, clients):
    last = 0 if parameters["algorithm"] == "none" else parameters["rounds"]
    rows = [(r, j, "train_loss", 3.0 - r / 10, 5, 100, 4) for r in range(1, last + 1) for j in clients]
    rows += [(r, j, "test_loss", 3.0 - r / 20, 5, 100, 0) for r in range(last + 1) for j in clients]
    return pd.DataFrame(rows, columns=["round", "client", "metric", "value", "examples", "tokens", "steps"])


def _utility(parameters, own):
    name = "accuracy" if parameters["task"] == "classification" else "rouge_l"
    last = 0 if parameters["algorithm"] == "none" else parameters["rounds"]
    rows = [(r, -1, name, "test", 0.2 + own / 10, 4, 10, 0, 0) for r in sorted({0, last})]
    rows += [
        (r, -1, "perplexity", split, 9.0, 4, 10, 0, 0) for r in sorted({0, last}) for split in ("train", "heldout")
    ]
    return pd.DataFrame(rows, columns=UTILITY)
