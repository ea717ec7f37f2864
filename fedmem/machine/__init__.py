"""What a process needs of the machine: paths and digests, locks. Nothing here depends on fedmem."""
