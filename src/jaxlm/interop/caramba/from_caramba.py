from jaxlm.reading.targets import Resolved, Selection


def is_caramba(tree):
    return False


def from_caramba(source, selection: Selection) -> Resolved:
    raise NotImplementedError
