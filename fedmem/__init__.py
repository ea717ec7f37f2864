"""fedmem: how much private training text does a federated language model give back, and to whom?"""
