"""Exceptions that a command turns into one message."""


class ConfigError(ValueError):
    """The user asked for something impossible: what was given, what is allowed, what to change.

    Commands print its text without a traceback and exit with code 2.
    """


class PeerError(Exception):
    """Another process of the run has failed, and this one has nothing left to do.

    Commands print its text without a traceback and exit with code 1.
    """
