"""Notebook 2: federated, central and local training, checkpoints, utility and perplexity."""
