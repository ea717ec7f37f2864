"""A causal language model: names, files, loading, tokenizer and training examples, adapters, decoding, text."""
