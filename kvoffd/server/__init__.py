"""The daemon's rim: sockets, sessions, dispatch, publishing. What decides lives in ``cache`` and ``transfer``."""
