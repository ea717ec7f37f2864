"""The commands of `fedmem`, a module each room; each has `add_commands(commands)`, which `fedmem.cli` calls."""
