"""The parameters: the words that they use, one frozen model per stage, and the reading of YAML."""
