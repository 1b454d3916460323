"""The activities of a process. `engine/activity.py` counts their time."""

import enum


class Activity(enum.StrEnum):
    """What the main thread of a process is doing."""

    START = "start"  # everything that is not named below: imports, reading the configuration, opening data, and the end
    COMPILE = "compile"
    RESTORE = "restore"
    DATA = "data wait"
    ANNOTATION = "annotation"
    ROLLOUT = "rollout"
    STEP = "step"
    EVAL = "eval"
    SAVE = "save"
    BRANCH = "branch"
