"""Fixtures of the tests of training: three clients of two rows each, a tiny Qwen2 and a tokenizer for them."""

import pandas as pd
import pytest
import torch
from small_federation import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fedmem.train.federation import client_datasets

EOS = "<|endoftext|>"  # the name that a Qwen2 tokenizer would add to the vocabulary if it were missing

SENTENCES = [
    "the patient reports a dull pain in the left knee since monday",
    "blood pressure was measured twice and found to be normal",
    "a course of antibiotics was begun and the fever went down",
    "the cough is dry and worse at night but there is no wheeze",
    "an x ray of the chest showed no sign of infection today",
    "sleep has been poor and the appetite is lower than before",
    "the rash on both arms has faded after the cream was applied",
    "she was told to rest and to drink more water than usual",
    "his heart rate rose during the walk and fell soon after it",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[EOS], initial_alphabet=alphabet)
    raw.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS, pad_token=EOS)


@pytest.fixture(scope="module")
def new_model():
    """A function that makes the same small model anew."""

    def make() -> Qwen2ForCausalLM:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = Qwen2Config(vocab_size=300, num_key_value_heads=1, tie_word_embeddings=True, **sizes)
        return Qwen2ForCausalLM(config).eval()

    return make


@pytest.fixture
def model(new_model) -> Qwen2ForCausalLM:
    return new_model()


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    """3 clients of 2 training rows and 1 test row."""
    names = [f"p0-{number}" for number in range(9)]
    frame = pd.DataFrame({"row_id": names, "input": SENTENCES, "instruction": "", "output": "noted"})
    return frame.assign(client=[i % 3 for i in range(9)], split=["train"] * 6 + ["test"] * 3)


@pytest.fixture
def train_sets(rows, tokenizer) -> dict:
    return client_datasets(rows, tokenizer, settings())
