"""fedmem: how much private training text does a federated language model give back, and to whom?"""

import warnings

# An executed notebook keeps text bars; advice of tqdm to install widgets would name a path of the machine there.
warnings.filterwarnings("ignore", message="IProgress not found")
