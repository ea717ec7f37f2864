"""The `fedmem` command."""
