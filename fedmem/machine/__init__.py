"""What a process needs of the machine: paths and digests, other processes, locks. Nothing here depends on fedmem."""
