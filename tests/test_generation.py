from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from small_models import says
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from fedmem.config.parameter import ConfigError
from fedmem.config.stages import GenerateConfig
from fedmem.corpus.loading import load_corpus
from fedmem.generate.probes import GenerationError, continue_prefixes, lengths, sample, split_inputs
from fedmem.models.decoding import Decoding, DecodingError, Draw, splitmix64
from fedmem.models.examples import encode, template_start
from fedmem.models.text_generation import stop_ids

TEXT = [
    "The patient reports a dull pain in the left shoulder, and no fever since Monday.",
    "After three days of rest the swelling had gone , she said , 'quite sensibly' !",
    "Doctor: How are you today?\nPatient: Not well. I've been coughing; it won't stop.",
]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END, START, TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def train_tokenizer(chat: bool, vocabulary: int = 400) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, with the normaliser and the chat template of Qwen2 or without both."""
    core = Tokenizer(BPE())
    core.normalizer = normalizers.NFC() if chat else None
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [END, START, TURN] if chat else [END]
    core.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END)
    if chat:
        tokenizer.add_special_tokens({"additional_special_tokens": [START, TURN]})
        tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture(scope="module")
def chat():
    return train_tokenizer(chat=True)


@pytest.fixture(scope="module")
def plain():
    return train_tokenizer(chat=False)


def tiny(kind: str, tokenizer, context: int = 256):
    """A random model: rotary positions (Qwen2) or learnt absolute ones (GPT-2)."""
    torch.manual_seed(0)
    size = len(tokenizer)
    if kind == "qwen2":
        config = Qwen2Config(
            vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=context, initializer_range=0.3,
        )  # fmt: skip
        return Qwen2ForCausalLM(config).eval()
    config = GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=4, n_positions=context, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


def reciter(tokenizer, ids: list[int]) -> Qwen2ForCausalLM:
    """A model that says what it is told: after ids[i] comes ids[i + 1] (ids distinct)."""
    return says(tokenizer, *pairwise(ids))


def frame(*inputs: str, split: str = "train", client: int = 0, **more) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "row_id": [f"{split}{client}-{n}" for n in range(len(inputs))], "client": client, "split": split,
            "group": "g", "instruction": "Why?", "input": list(inputs), "output": "Because.",
        }
    ).assign(**more)  # fmt: skip


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# ---- prefixes and suffixes


def cut(rows, tokenizer, prefix_tokens, least=None):
    config = GenerateConfig.create({"prefix_tokens": prefix_tokens, "min_input_tokens": least})
    return split_inputs(rows, tokenizer, config)


@pytest.mark.parametrize("kind", ["chat", "plain"])
@pytest.mark.parametrize("prefix_tokens", [1, 7, 16])
def test_prompt_ids_are_the_training_ids(request, kind, prefix_tokens):
    tokenizer = request.getfixturevalue(kind)
    rows = frame(*TEXT, "\n \nIt starts with two line breaks, as notes do, and it ends in spaces.  ")
    texts = cut(rows, tokenizer, prefix_tokens, prefix_tokens + 1)
    examples = encode(tokenizer, rows, max_tokens=512)
    n_start = len(ids_of(tokenizer, template_start(tokenizer)))
    for line, example in zip(texts.to_dict("records"), examples, strict=True):
        assert line["prompt_ids"] == example["input_ids"][: n_start + prefix_tokens]
        assert line["prefix"] + line["suffix"] == line["input"]
    assert texts["long_enough"].all()


def test_the_cut_is_where_the_tokens_end(plain):
    text = TEXT[0]
    tokens = plain.convert_ids_to_tokens(ids_of(plain, text))
    first = "".join(tokens[:5]).replace("Ġ", " ")
    texts = cut(frame(text), plain, 5, 6)
    assert texts["prefix"].tolist() == [first]
    assert texts["input_tokens"].tolist() == [len(tokens)]


@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_a_cut_never_falls_inside_a_character(request, kind):
    tokenizer = request.getfixturevalue(kind)
    text = "a 然🎉é 然然🎉🎉 e\u0301 ok then, it goes on"  # 3 and 4 byte tokens a character, and a decomposed é
    n = len(ids_of(tokenizer, text))
    for prefix_tokens in range(1, n - 1):
        line = cut(frame(text), tokenizer, prefix_tokens, prefix_tokens + 1).iloc[0]
        assert line["prefix"] + line["suffix"] == text
        said = tokenizer.decode(line["prompt_ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "\ufffd" not in said
        # é may come back composed: the chat tokenizer's normaliser is NFC, as Qwen2's
        assert said.replace("é", "e\u0301").endswith(line["prefix"].replace("é", "e\u0301"))
    # "a", " ", then the first byte of 然: three tokens end inside it, so the cut moves behind it
    assert cut(frame(text), tokenizer, 3, 4)["prefix"].tolist() == ["a 然"]


def test_short_inputs_are_kept_and_counted(plain):
    long = " ".join(TEXT)
    n = len(ids_of(plain, long))
    rows = pd.concat([frame(long, "Short."), frame(long + " More.", split="heldout")], ignore_index=True)
    texts = cut(rows, plain, prefix_tokens=n - 20)
    assert texts["long_enough"].tolist() == [True, False, True]  # prefix + 20 = n: just long enough
    assert not cut(rows, plain, n - 19)["long_enough"][0]
    table = lengths(texts).set_index("split")
    assert table.loc["train", ["rows", "long_enough", "share"]].tolist() == [2, 1, 0.5]
    # the two long rows begin alike
    assert table["shared_prefix"].to_dict() == {"train": 1, "heldout": 1}
    assert table["unequal_round_trip"].sum() == 0


def test_one_shortest_input_makes_all_prefix_lengths_ask_about_the_same_rows(plain):
    inputs = [" ".join([f"Row {i}.", *TEXT[:n]]) for i in range(8) for n in (1, 2, 3)]
    rows = pd.concat([frame(*inputs), frame(*[f"Held out. {text}" for text in inputs], split="heldout")])

    def probed(prefix_tokens, least):
        prefixes, _ = sample(cut(rows, plain, prefix_tokens, least), 8, None, seed=1)
        return prefixes["row_id"].tolist()

    n = len(ids_of(plain, inputs[2]))  # an input of all three texts; 16 of 24 are shorter
    assert probed(10, n) == probed(20, n) == probed(n - 20, n)
    assert probed(10, None) != probed(n - 20, None)


def test_what_the_tokenizer_changes_is_counted(chat):
    texts = cut(frame("e\u0301 is two signs here, and one after NFC.", TEXT[0]), chat, 5, 6)
    assert texts["round_trip"].tolist() == [False, True]
    assert lengths(texts)["unequal_round_trip"].tolist() == [1]


def test_prefix_tokens_out_of_range(plain):
    for prefix_tokens, least in ((0, 5), (10, 10)):
        with pytest.raises(ConfigError, match=r"prefix_tokens: got 0; expected|expected more than prefix_tokens = 10"):
            cut(frame(*TEXT), plain, prefix_tokens, least)


@pytest.mark.parametrize("task", ["summarization", "dialog", "qa", "classification"])
def test_real_texts(shared, task, chat):
    rows = load_corpus("file", task, path=shared / "data" / f"{task}.jsonl").tail(60)
    rows = rows.rename(columns={"id": "row_id"}).assign(client=0, split="train")
    texts = cut(rows, chat, 30)
    assert (texts["prefix"] + texts["suffix"] == texts["input"]).all()
    for line, example in zip(texts.to_dict("records"), encode(chat, rows, 4096), strict=True):
        assert line["prompt_ids"] == example["input_ids"][: len(line["prompt_ids"])]


# ---- sampling


def many(n: int = 12) -> pd.DataFrame:
    """Two clients of n training and n held-out rows, as `split_inputs` would give them."""
    lines = [
        {"row_id": f"{split}-{client}-{i}", "client": client, "split": split, "input": f"{split} {client} {i}",
         "long_enough": True, "prefix": f"p{i}", "suffix": f"s{i}", "prompt_ids": [i]}
        for client in (0, 1) for split in ("train", "test", "heldout") for i in range(n)
    ]  # fmt: skip
    return pd.DataFrame(lines)


def test_samples_are_nested_and_whatever_the_order_the_same():
    few, _ = sample(many(), 3, None, seed=1)
    more, suffixes = sample(many().sample(frac=1, random_state=0), 6, 9, seed=1)
    for client in (0, 1):
        tables = (few, more, suffixes[suffixes["member"]])
        ids = [table[table["client"] == client]["row_id"].tolist() for table in tables]
        assert [len(part) for part in ids] == [3, 6, 9]
        assert ids[0] == ids[1][:3]
        assert ids[1] == ids[2][:6]
    assert suffixes.groupby(["client", "member"]).size().tolist() == [9, 9, 9, 9]
    assert suffixes.query("member")["row_id"].str.startswith("train").all()
    assert suffixes.query("not member")["row_id"].str.startswith("heldout").all()
    assert sample(many(), 6, None, seed=2)[0]["row_id"].tolist() != more["row_id"].tolist()
    assert few["prefix_id"].is_unique
    assert suffixes["suffix_id"].is_unique
    assert few["prefix_id"][0] == f"p0-{few['row_id'][0]}"


def test_the_order_is_shuffled():
    prefixes, _ = sample(many(200), 200, None, seed=0)
    places = prefixes.query("client == 0")["prompt_ids"].str[0].to_numpy()
    assert abs(np.corrcoef(places, np.arange(200))[0, 1]) < 0.25  # 3.5 standard deviations of 1/√199


def test_each_input_once_and_no_trained_text_as_control():
    texts = many(4)
    texts.loc[texts["row_id"] == "train-0-1", "input"] = "train 0 0"
    with pytest.raises(
        GenerationError, match="client 0 has 3 training rows that are long enough and distinct, and 4 pre"
    ):
        sample(texts, 4, 3, seed=0)
    texts = many(4)
    texts.loc[texts["row_id"] == "heldout-1-2", "input"] = "train 0 3"  # another client was trained on it
    with pytest.raises(GenerationError, match="client 1 has 3 held-out rows"):
        sample(texts, 4, None, seed=0)
    assert "heldout-1-2" not in sample(texts, 3, None, seed=0)[1]["row_id"].tolist()
    texts = many(4)
    texts.loc[texts["row_id"] == "train-1-0", "long_enough"] = False
    assert "train-1-0" not in sample(texts, 3, None, seed=0)[0]["row_id"].tolist()


# ---- decoding


def test_decoding_of_a_config():
    assert Decoding.from_config(GenerateConfig(decoding="top_p", temperature=0.5)) == Decoding("top_p", 0.5, top_p=0.95)
    assert Decoding.from_config(GenerateConfig(top_k=9)) == Decoding("top_k", 1.0, top_k=9)
    assert Decoding.from_config(GenerateConfig(decoding="greedy")) == Decoding("greedy")


def test_only_what_was_asked_acts():
    assert Decoding.of("temperature", 0.5, top_k=9, top_p=0.1) == Decoding("temperature", 0.5)
    assert Decoding.of("top_k", 1, top_k=9, top_p=0.1) == Decoding("top_k", 1.0, top_k=9)
    assert Decoding.of("top_p", 2, top_k=9, top_p=1) == Decoding("top_p", 2.0, top_p=1.0)
    assert Decoding.of("greedy", -3, top_k=0) == Decoding("greedy")
    assert (
        str(Decoding.of("temperature", 1)) == "temperature: temperature=1.0 top_k=off top_p=off repetition_penalty=off"
    )
    assert str(Decoding.of("top_k", 0, top_k=5)).startswith(
        "greedy (top_k at temperature 0): temperature=off top_k=off"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"decoding": "beam"}, {"decoding": "temperature", "temperature": -0.1},
        {"decoding": "temperature", "temperature": float("nan")}, {"decoding": "temperature", "temperature": "1"},
        {"decoding": "top_k", "top_k": 0}, {"decoding": "top_k", "top_k": 4.0}, {"decoding": "top_k"},
        {"decoding": "top_p", "top_p": 0}, {"decoding": "top_p", "top_p": 1.01}, {"decoding": "top_p"},
    ],
)  # fmt: skip
def test_settings_out_of_range(settings):
    with pytest.raises(DecodingError, match="expected"):
        Decoding.of(**settings)


def test_splitmix64_gives_the_published_numbers():
    # the first outputs of the reference C code (Vigna) for the seed 1234567
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    found = splitmix64(torch.tensor([[1234567]]), torch.arange(1, 6))[0]
    assert [number % 2**64 for number in found.tolist()] == known


def shares(decoding: Decoding, probabilities: list[float], draws: int = 40_000) -> np.ndarray:
    """How often each token is drawn, through the processors that `generate` gets."""
    prompts = [[i] for i in range(draws)]
    ids = torch.zeros((draws, 1), dtype=torch.long)
    scores = torch.tensor(probabilities).log().repeat(draws, 1)
    for processor in decoding.processors(prompts, seed=3, steps=1, width=1):
        scores = processor(ids, scores)
    return np.bincount(scores.argmax(-1).numpy(), minlength=len(probabilities)) / draws


@pytest.mark.parametrize(
    ("decoding", "expected"),
    [
        (Decoding.of("temperature", 1), [0.5, 0.25, 0.15, 0.1]),
        # T = 0.5 squares: 0.25, 0.0625, 0.0225, 0.01, of a sum of 0.345
        (Decoding.of("temperature", 0.5), [0.7246, 0.1812, 0.0652, 0.0290]),
        # the two likeliest: 0.5 and 0.25 of 0.75
        (Decoding.of("top_k", 1, top_k=2), [2 / 3, 1 / 3, 0, 0]),
        # 0.5 + 0.25 < 0.8 ≤ 0.5 + 0.25 + 0.15: three tokens, of a sum of 0.9
        (Decoding.of("top_p", 1, top_p=0.8), [0.5556, 0.2778, 0.1667, 0]),
        # squared first: 0.7246 + 0.1812 ≥ 0.8, so two tokens: 0.25 and 0.0625 of 0.3125
        (Decoding.of("top_p", 0.5, top_p=0.8), [0.8, 0.2, 0, 0]),
    ],
)
def test_draws_are_exact(decoding, expected):
    found = shares(decoding, [0.5, 0.25, 0.15, 0.1])
    assert np.abs(found - expected).max() < 0.01  # 4 standard deviations of √(¼ / 40,000)
    assert (found[np.array(expected) == 0] == 0).all()


def test_noise_belongs_to_row_and_step_alone():
    keys = torch.arange(12).reshape(3, 4)
    scores = torch.zeros(3, 1000)
    ids = torch.zeros(3, 7, dtype=torch.long)
    chosen = Draw(keys, width=5)(ids, scores).argmax(-1)  # 7 tokens, 5 of them prompt: step 2
    alone = [Draw(keys[[row]], width=5)(ids[[row]], scores[[row]]).argmax(-1) for row in range(3)]
    assert chosen.tolist() == torch.cat(alone).tolist()
    assert len(set(chosen.tolist())) == 3
    assert chosen.tolist() != Draw(keys, width=4)(ids, scores).argmax(-1).tolist()


# ---- continuation

STRATEGIES = {
    "greedy": Decoding.of("greedy"),
    "temperature": Decoding.of("temperature", 1),
    "top_k": Decoding.of("top_k", 1, top_k=20),
    "top_p": Decoding.of("top_p", 1, top_p=0.9),
}


def go_on(model, tokenizer, prompts, decoding, new=24, seed=7, batch=8):
    config = GenerateConfig.create({"max_new_tokens": new, "decode_seed": seed, "generate_batch": batch})
    return continue_prefixes(model, tokenizer, prompts, decoding, config)


def prompts_of(tokenizer) -> list[list[int]]:
    """Prompts of 3 to about 30 tokens."""
    return [ids_of(tokenizer, text)[:n] for n, text in zip((3, 30, 11, 4, 26, 9), TEXT * 2, strict=True)]


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_alone_batched_or_reordered_the_same(kind, strategy, plain):
    model, prompts, decoding = tiny(kind, plain), prompts_of(plain), STRATEGIES[strategy]
    together = go_on(model, plain, prompts, decoding)
    alone = pd.concat([go_on(model, plain, [prompt], decoding) for prompt in prompts], ignore_index=True)
    pd.testing.assert_frame_equal(together, alone)
    backwards = go_on(model, plain, prompts[::-1], decoding, batch=4)
    pd.testing.assert_frame_equal(together, backwards[::-1].reset_index(drop=True))
    assert together["continuation"].nunique() > 1


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_greedy_is_what_a_plain_loop_without_cache_says(kind, plain):
    model, prompts = tiny(kind, plain), prompts_of(plain)
    found = go_on(model, plain, prompts, STRATEGIES["greedy"], new=12)
    for prompt, text, n, finished in zip(
        prompts, found["continuation"], found["new_tokens"], found["finished"], strict=True
    ):
        ids = list(prompt)
        with torch.no_grad():
            while len(ids) < len(prompt) + 12 and ids[-1] != plain.eos_token_id:
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        new = ids[len(prompt) :]
        assert finished == (new[-1] == plain.eos_token_id)
        assert n == len(new) - finished
        assert text == plain.decode(new[:n]).rstrip("\ufffd")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_checkpoints_own_settings_never_act(strategy, plain):
    model, prompts, decoding = tiny("gpt2", plain), prompts_of(plain), STRATEGIES[strategy]  # gpt2 has dropout
    expected = go_on(model, plain, prompts, decoding)
    own = GenerationConfig(
        repetition_penalty=1.5, top_k=2, top_p=0.3, temperature=0.2, do_sample=True, no_repeat_ngram_size=2,
        min_new_tokens=3, num_beams=2, suppress_tokens=[5, 6, 7], eos_token_id=9, max_length=7,
        encoder_repetition_penalty=2.0, typical_p=0.5, min_p=0.2,
    )  # fmt: skip
    model.generation_config = own
    model.train()
    pd.testing.assert_frame_equal(go_on(model, plain, prompts, decoding), expected)
    assert model.generation_config is own
    assert model.training
    assert "repetition_penalty=off" in expected["decoding"][0]


def test_no_hidden_top_k(plain):
    model = reciter(plain, [])  # all tokens alike
    found = go_on(model, plain, [[n] for n in range(1, 9)], Decoding.of("temperature", 1), new=50)
    text = found["continuation"].str.cat()
    assert len(set(ids_of(plain, text))) > 100  # transformers' own default would leave 50 tokens
    few = go_on(model, plain, [[n] for n in range(1, 9)], Decoding.of("temperature", 1), new=50, seed=8)
    assert few["continuation"].tolist() != found["continuation"].tolist()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("stop", [END, TURN])
def test_it_says_what_the_model_says_and_stops(chat, strategy, stop):
    told = " 'gone' , she\nsaid!"
    ids = ids_of(chat, told)
    assert len(set(ids)) == len(ids)
    ids = [ids_of(chat, "Q")[0], *ids, chat.convert_tokens_to_ids(stop), ids_of(chat, "Z")[0]]
    found = go_on(reciter(chat, ids), chat, [ids[:1], ids[:3], ids[:2]], STRATEGIES[strategy], new=40)
    starts = [told, chat.decode(ids[3:-2]), chat.decode(ids[2:-2])]
    assert found["continuation"].tolist() == starts
    assert found["new_tokens"].tolist() == [len(ids) - 3, len(ids) - 5, len(ids) - 4]
    assert found["finished"].all()
    cut = go_on(reciter(chat, ids), chat, [ids[:1]], STRATEGIES[strategy], new=3)
    assert cut.iloc[0][["continuation", "new_tokens", "finished"]].tolist() == [chat.decode(ids[1:4]), 3, False]


def test_an_unfinished_character_is_no_text(plain):
    ids = [*ids_of(plain, "Q"), *ids_of(plain, "a然")]  # Q, a, and three bytes
    assert len(ids) == 5
    found = [go_on(reciter(plain, ids), plain, [ids[:1]], STRATEGIES["greedy"], new=n) for n in (1, 2, 3, 4)]
    assert [frame["continuation"][0] for frame in found] == ["a", "a", "a", "a然"]
    assert [frame["new_tokens"][0] for frame in found] == [1, 2, 3, 4]


def test_stop_ids(chat, plain):
    assert stop_ids(plain) == [plain.eos_token_id]
    assert set(stop_ids(chat)) == set(chat.convert_tokens_to_ids([END, TURN]))


def test_the_budget_does_not_depend_on_the_prompt(plain):
    ids = list(range(10, 190))
    model = reciter(plain, ids)
    found = go_on(model, plain, [ids[:n] for n in (10, 30, 50, 100)], STRATEGIES["greedy"], new=60)
    assert found["new_tokens"].tolist() == [60] * 4


def test_beyond_the_context_is_an_error_before_any_work(plain):
    model = tiny("gpt2", plain, context=64)
    assert go_on(model, plain, [[5] * 40], STRATEGIES["greedy"], new=24)["new_tokens"][0] <= 24  # 40 + 24 = 64
    model.generate = None  # would fail
    with pytest.raises(GenerationError, match=r"40 tokens .* max_new_tokens = 25 .* holds 64: .* at most 24"):
        go_on(model, plain, [[5] * 40], STRATEGIES["greedy"], new=25)
    with pytest.raises(ConfigError, match="max_new_tokens: got 0"):
        go_on(model, plain, [[5]], STRATEGIES["greedy"], new=0)


def test_rows_keep_their_index(plain):
    prompts = pd.Series(prompts_of(plain), index=[5, 3, 9, 1, 0, 2])
    found = go_on(tiny("gpt2", plain), plain, prompts, STRATEGIES["top_k"])
    assert found.index.tolist() == [5, 3, 9, 1, 0, 2]
    assert list(found.columns) == ["continuation", "new_tokens", "finished", "decoding"]
    longer = go_on(tiny("gpt2", plain), plain, prompts, STRATEGIES["top_k"], new=30)
    for short, long in zip(found["continuation"], longer["continuation"], strict=True):
        assert long.startswith(short)  # more steps only append
