"""Stage folders: identity, finished stages, stages in the making, and the studies made of them."""
