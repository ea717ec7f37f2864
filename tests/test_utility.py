"""Utility and perplexity: hand-computed figures, models that say what they are told, and the weighted table."""

import copy
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from small_models import says
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from fedmem.config.partition import PartitionConfig
from fedmem.config.stages import GenerateConfig, TrainConfig
from fedmem.config.vocabulary import POOLED
from fedmem.models.examples import encode, render, template_start
from fedmem.models.loading import load_model, load_tokenizer
from fedmem.results.work import begin_stage
from fedmem.train import evaluation
from fedmem.train.evaluation import answer_prompt, answer_scores, class_label, measure, rouge_l
from fedmem.train.history import UTILITY, utility_of_run, with_weighted_means

INSTRUCTION = "Which section is this from: methods, results?"
TEXTS = ("Rest eased the pain of the knee.", "Nurses tried ice.", "After supper the ankle was sore, and heat helped.")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-qwen2")


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny-qwen2", "cpu")[0]


def settings(**changes) -> TrainConfig:
    return TrainConfig(**{"utility_rows": 4, "utility_tokens": 6, "perplexity_rows": 4, "max_tokens": 128} | changes)


def deal(n_clients=2, splits=("train", "test", "heldout"), output="results", n=3) -> pd.DataFrame:
    return pd.DataFrame(
        [
            (f"{split}{client}-{i}", client, split, INSTRUCTION, f"{split} {client}: {TEXTS[i]}", output)
            for client in range(n_clients)
            for split in splits
            for i in range(n)
        ],
        columns=["row_id", "client", "split", "instruction", "input", "output"],
    )


def figures(measured: pd.DataFrame, metric: str, column: str = "value") -> dict:
    chosen = measured[measured["metric"] == metric]
    return dict(zip(zip(chosen["client"], chosen["split"], strict=True), chosen[column], strict=True))


# ---- scores by hand


def test_rouge_l_by_hand():
    # stemmed, the answer "the cat sat" is a subsequence of 3 of the output's 6 words: P = 3/3, R = 3/6, F1 = 2/3
    assert rouge_l("the cats sat", "The cat sat on the mat.") == pytest.approx(2 / 3)
    # longest common subsequence of "a b c d" and "b d a" is "b d": P = 2/3, R = 2/4, F1 = 4/7
    assert rouge_l("b d a", "a b c d") == pytest.approx(4 / 7)
    assert rouge_l("", "the cat") == rouge_l("dog", "the cat") == 0
    # the mean of 2/3 and 0
    assert answer_scores("qa", ["the cats sat", "dog"], ["The cat sat on the mat.", "cat"], []) == {
        "rouge_l": pytest.approx(1 / 3)
    }


def test_accuracy_and_macro_f1_by_hand_with_a_class_that_is_missing():
    outputs = ["a", "a", "b", "c"]
    answers = ["a", "b", "b", "c is a letter"]
    # right: 1st and 3rd. a: tp 1, fn 1 → 2/3; b: tp 1, fp 1 → 2/3; c: fn 1 → 0 (its answer is no label);
    # d occurs in neither and is left out: (2/3 + 2/3 + 0) / 3 = 4/9
    assert answer_scores("classification", answers, outputs, ["a", "b", "c", "d"]) == {
        "accuracy": 0.5,
        "macro_f1": pytest.approx(4 / 9),
    }
    # d is answered once and never right: F1 = 0 counts, (2/3 + 1 + 1 + 0) / 4
    scores = answer_scores("classification", ["a", "d", "b", "c"], outputs, ["a", "b", "c", "d"])
    assert scores == {"accuracy": 0.75, "macro_f1": pytest.approx((2 / 3 + 2) / 4)}
    # a class that no training row has counts all the same
    assert answer_scores("classification", ["a"], ["new"], ["a"]) == {"accuracy": 0.0, "macro_f1": 0.0}


def test_labels_are_compared_by_their_first_line():
    assert class_label("  Results \nand more") == class_label("results") == "results"
    assert class_label(" \n ") == class_label("") == ""


def test_scores_of_nothing_are_undefined():
    assert np.isnan(answer_scores("dialog", [], [], [])["rouge_l"])
    assert all(np.isnan(list(answer_scores("classification", [], [], ["a"]).values())))


# ---- measured on models


def test_a_uniform_model_has_the_vocabulary_as_perplexity(tokenizer):
    measured = measure(says(tokenizer), tokenizer, deal(), settings(), "qa", 0)
    assert list(measured.columns) == UTILITY
    values = figures(measured, "perplexity")
    assert list(values) == [(j, split) for j in (0, 1) for split in ("train", "test", "heldout")]
    assert list(values.values()) == pytest.approx([len(tokenizer)] * 6, rel=1e-5)
    rows = deal()
    own = rows[(rows["client"] == 1) & (rows["split"] == "heldout")].to_dict("records")
    n_ids = sum(len(tokenizer(render(tokenizer, row).text)["input_ids"]) for row in own)
    assert figures(measured, "perplexity", "tokens")[1, "heldout"] == n_ids - 3  # a row's first is not predicted


def test_a_model_that_says_results_is_right_where_that_is_the_output(tokenizer):
    newline, end = (tokenizer.convert_tokens_to_ids(token) for token in ("Ċ", tokenizer.eos_token))
    word = tokenizer("results")["input_ids"][0]
    model = says(tokenizer, (newline, word), (word, end))
    rows = deal()
    rows.loc[(rows["client"] == 1) & (rows["row_id"] == "test1-0"), "output"] = "Methods"
    measured = measure(model, tokenizer, rows, settings(), "classification", 3)
    assert set(measured["round"]) == {3}
    assert figures(measured, "accuracy") == {(0, "test"): 1, (1, "test"): pytest.approx(2 / 3)}
    # client 1: results has tp 2, fp 1 → 4/5; methods fn 1 → 0; background is not among the labels
    assert figures(measured, "macro_f1") == {(0, "test"): 1, (1, "test"): pytest.approx(0.4)}
    assert figures(measured, "accuracy", "tokens") == {(0, "test"): 3, (1, "test"): 3}  # a word each
    assert measure(model, tokenizer, rows, settings(), "qa", 3)["value"].iloc[0] == 1.0  # ROUGE-L of the same answers


def test_an_answer_has_at_most_utility_tokens(tokenizer):
    newline, word = tokenizer.convert_tokens_to_ids("Ċ"), tokenizer("results")["input_ids"][0]
    babbler = says(tokenizer, (newline, word), (word, word))
    measured = measure(babbler, tokenizer, deal(1), settings(utility_tokens=5), "qa", 0)
    assert figures(measured, "rouge_l", "tokens") == {(0, "test"): 15}
    assert figures(measured, "rouge_l", "n") == {(0, "test"): 3}


def test_batches_clients_and_order_of_rows_change_nothing(tokenizer, tiny, monkeypatch):
    rows, config = deal(), settings(utility_tokens=12, utility_rows=2, perplexity_rows=2)
    whole = measure(tiny, tokenizer, rows, config, "dialog", 0)
    alone = [measure(tiny, tokenizer, rows, config, "dialog", 0, clients=[client]) for client in (0, 1)]
    key = ["metric", "client", "split"]
    pd.testing.assert_frame_equal(
        pd.concat(alone).sort_values(key, ignore_index=True), whole.sort_values(key, ignore_index=True)
    )
    shuffled = rows.sample(frac=1, random_state=0).reset_index(drop=True)
    pd.testing.assert_frame_equal(measure(tiny, tokenizer, shuffled, config, "dialog", 0), whole)
    monkeypatch.setattr(evaluation, "BATCH", 1)
    single = measure(tiny, tokenizer, rows, config, "dialog", 0)
    pd.testing.assert_frame_equal(single, whole, rtol=1e-5)
    assert figures(single, "rouge_l") == figures(whole, "rouge_l")  # the answers are the same, to the letter


def test_a_checkpoints_own_generation_config_does_not_act_and_stays(tokenizer, tiny):
    model, rows = copy.deepcopy(tiny), deal(1)
    model.generation_config = GenerationConfig(repetition_penalty=5.0, min_new_tokens=6, num_beams=2)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pd.testing.assert_frame_equal(
        measure(model, tokenizer, rows, settings(), "qa", 0), measure(tiny, tokenizer, rows, settings(), "qa", 0)
    )
    assert model.training
    assert model.generation_config.repetition_penalty == 5.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_adapter_is_measured_and_its_model_keeps_its_generation_config(tokenizer, tiny):
    peft = pytest.importorskip("peft")
    rows, base = deal(1), copy.deepcopy(tiny)
    base.generation_config = GenerationConfig(repetition_penalty=5.0)
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    pd.testing.assert_frame_equal(  # a fresh adapter adds 0
        measure(adapted, tokenizer, rows, settings(), "qa", 0), measure(tiny, tokenizer, rows, settings(), "qa", 0)
    )
    assert base.generation_config.repetition_penalty == adapted.generation_config.repetition_penalty == 5.0


# ---- which rows, and what of them


def test_fewer_rows_are_the_first_of_more_and_duplicates_of_training_rows_are_none(tokenizer, tiny):
    rows = deal(1)
    sizes = [
        figures(measure(tiny, tokenizer, rows, settings(perplexity_rows=n), "qa", 0), "perplexity", "tokens")
        for n in (1, 2, 3, 9)
    ]
    for split in ("train", "test", "heldout"):
        tokens = [size[0, split] for size in sizes]
        assert tokens[0] < tokens[1] < tokens[2] == tokens[3]
    rows.loc[rows["row_id"] == "test0-1", "input"] = rows["input"].iloc[0]  # of train0-0
    measured = measure(tiny, tokenizer, rows, settings(), "qa", 0)
    assert figures(measured, "rouge_l", "n") == {(0, "test"): 2}
    assert figures(measured, "perplexity", "n") == {(0, "train"): 3, (0, "test"): 2, (0, "heldout"): 3}


def test_no_test_rows_are_undefined_and_no_fault(tokenizer, tiny):
    rows = deal(splits=("train", "heldout"))
    measured = with_weighted_means(measure(tiny, tokenizer, rows, settings(), "classification", 0), rows)
    tests = measured[measured["split"] == "test"]
    assert set(tests["metric"]) == {"accuracy", "macro_f1", "perplexity"}
    assert tests["value"].isna().all()
    assert (tests["n"] == 0).all()
    assert measured.loc[measured["split"] != "test", "value"].notna().all()


def test_nothing_is_measured_where_0_rows_are_asked(tokenizer):
    rows = deal()
    measured = with_weighted_means(
        measure(says(tokenizer), tokenizer, rows, settings(utility_rows=0, perplexity_rows=0), "qa", 0), rows
    )
    assert len(measured) == 3 * 4
    assert measured["value"].isna().all()
    assert not measured[["n", "tokens", "cut", "left_out"]].any(axis=None)


def test_a_row_without_an_output_is_not_asked(tokenizer, tiny):
    rows = deal(1)
    rows.loc[rows["row_id"] == "test0-2", "output"] = " "
    assert figures(measure(tiny, tokenizer, rows, settings(), "qa", 0), "rouge_l", "n") == {(0, "test"): 2}


@pytest.mark.parametrize("chat", [True, False])
def test_a_prompt_is_what_training_saw_up_to_the_answer(tokenizer, chat):
    own = copy.deepcopy(tokenizer)
    if not chat:
        own.chat_template = None
    row = deal(1).iloc[0].to_dict() | {"output": "results of it"}
    example = encode(own, [row], 512)[0]["input_ids"]
    ids, cut = answer_prompt(own, row, 512)
    assert not cut
    assert ids == example[: len(ids)]
    asked, answered = own.decode(ids), own.decode(example[len(ids) :])
    assert asked.endswith("assistant\n" if chat else f"{INSTRUCTION}\n\n")
    assert answered.startswith("results of it")


def test_a_long_row_loses_the_end_of_its_input_and_is_counted(tokenizer, tiny):
    rows = deal(1)
    row = rows[rows["row_id"] == "test0-2"].iloc[0].to_dict()  # the longest of the three
    whole, _ = answer_prompt(tokenizer, row, 512)
    ids, cut = answer_prompt(tokenizer, row, len(whole) - 3)
    assert (cut, len(ids)) == (True, len(whole) - 3)
    text = tokenizer.decode(ids)
    assert text.endswith(f"\n\n{INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n")
    shown = text.removeprefix(template_start(tokenizer)).split("\n\n")[0]
    assert shown
    assert row["input"].startswith(shown)
    n_input = len(tokenizer(row["input"])["input_ids"])
    assert answer_prompt(tokenizer, row, len(whole) - n_input + 1) is not None  # one token of the input is left
    assert answer_prompt(tokenizer, row, len(whole) - n_input) is None

    fits = len(answer_prompt(tokenizer, rows[rows["row_id"] == "test0-1"].iloc[0].to_dict(), 512)[0])  # the shortest
    measured = measure(tiny, tokenizer, rows, settings(max_tokens=fits), "qa", 0)
    assert figures(measured, "rouge_l", "cut") == {(0, "test"): 2}
    assert figures(measured, "rouge_l", "left_out") == {(0, "test"): 0}
    assert figures(measured, "perplexity", "cut")[0, "test"] == 3  # examples end after the answer
    nothing = measure(tiny, tokenizer, rows, settings(max_tokens=8), "qa", 0)
    assert figures(nothing, "rouge_l", "left_out") == {(0, "test"): 3}
    assert np.isnan(figures(nothing, "rouge_l")[0, "test"])


def test_prompt_and_answer_fit_a_short_context(tokenizer):
    torch.manual_seed(0)
    size = len(tokenizer)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=16, n_layer=1, n_head=2, n_positions=40)).eval()
    measured = measure(model, tokenizer, deal(1), settings(max_tokens=40, utility_tokens=12), "qa", 0)
    assert figures(measured, "rouge_l", "cut") == {(0, "test"): 3}
    assert figures(measured, "rouge_l", "n") == {(0, "test"): 3}


# ---- the weighted mean, and a run's columns


def table(*values: tuple) -> pd.DataFrame:
    lines = [(*line, 2, 10, 1, 0) for line in values]
    return pd.DataFrame(lines, columns=UTILITY)


def test_the_mean_is_weighted_by_training_rows_and_of_logarithms_for_perplexities():
    rows = pd.DataFrame({"client": [0, 1, 1, 1, 0], "split": ["train"] * 4 + ["test"]})  # weights 1/4 and 3/4
    measured = table(
        (0, 0, "rouge_l", "test", 0.2), (0, 1, "rouge_l", "test", 0.6),
        (0, 0, "perplexity", "train", 2.0), (0, 1, "perplexity", "train", 8.0),
        (0, 0, "perplexity", "test", 2.0), (0, 1, "perplexity", "test", np.nan),
    )  # fmt: skip
    pooled = with_weighted_means(measured, rows)
    pd.testing.assert_frame_equal(pooled.iloc[:6], measured)
    pooled = pooled[pooled["client"] == POOLED]
    # 0.2/4 + 0.6·3/4; 2^(1/4) · 8^(3/4) = 2^2.5; a client with rows and no value leaves nothing defined
    assert pooled["value"].tolist() == pytest.approx([0.5, 2**2.5, np.nan], nan_ok=True)
    assert pooled["n"].tolist() == [4, 4, 4]
    assert pooled["tokens"].tolist() == [20, 20, 20]
    alone = with_weighted_means(measured[measured["client"] == 0], rows)  # client 1 was not measured
    assert alone.loc[alone["client"] == POOLED, "value"].isna().all()


def test_a_runs_columns_are_those_of_its_checkpoint_round(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    dealt = begin_stage(PartitionConfig()).publish()
    lines = [
        (r, client, metric, split, value * (1 if client == POOLED else 9))
        for r, rouge, perplexities in ((0, 0.1, (20, 20, 21)), (3, 0.4, (2, 5, 6)))
        for client in (0, POOLED)
        for metric, split, value in (
            ("rouge_l", "test", rouge),
            *(("perplexity", s, p) for s, p in zip(("train", "test", "heldout"), perplexities, strict=True)),
        )
    ]
    work = begin_stage(TrainConfig(rounds=3), dealt)
    work.save_table("utility", table(*lines))
    train = work.publish()
    before = {
        "utility_rouge_l_before": 0.1, "perplexity_train_before": 20, "perplexity_test_before": 20,
        "perplexity_heldout_before": 21, "perplexity_ratio_before": 1.05,
    }  # fmt: skip
    after = {"utility_rouge_l": 0.4, "perplexity_train": 2, "perplexity_test": 5, "perplexity_heldout": 6}
    assert utility_of_run(train) == pytest.approx(after | {"perplexity_ratio": 3} | before)
    for wanted, expected in (
        (None, after | {"perplexity_ratio": 3}),
        (2, dict.fromkeys([*after, "perplexity_ratio"], np.nan)),  # a round that was not measured
        (0, {name.removesuffix("_before"): value for name, value in before.items()}),
    ):
        stage = begin_stage(GenerateConfig(checkpoint_round=wanted), train).publish()
        assert utility_of_run(stage) == pytest.approx(expected | before, nan_ok=True)
    assert utility_of_run(begin_stage(TrainConfig(rounds=2), dealt).publish()) == {}  # it has no such table


def test_the_table_needs_no_torch():
    code = "import sys, fedmem.train.history; sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
