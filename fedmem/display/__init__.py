"""How results look: figures, numbers, pages, and the masking of private text."""
