"""The published study: its figures, its tables beside ours, and its claims."""
