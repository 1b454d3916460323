"""The one exception that a command turns into a message and exit code 2."""


class ConfigError(ValueError):
    """The user asked for something impossible: what was given, what is allowed, what to change.

    Commands print its text without a traceback and exit with code 2.
    """
