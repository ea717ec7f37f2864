"""Models that need no network: their recipes, how they are trained, and where they are kept."""
