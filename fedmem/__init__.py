"""fedmem measures how much private training text a federated language model gives back, and to whom."""

import warnings

# Executed notebooks keep tqdm's text bars. Its advice to install widgets would write a local path into their output.
warnings.filterwarnings("ignore", message="IProgress not found")
