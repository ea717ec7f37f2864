"""The PAN 2014 text-alignment detector (Sanchez-Perez, Gelbukh and Sidorov), as adapted for language models."""
