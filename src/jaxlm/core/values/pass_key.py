"""The sentences of a hidden pass key (Mohtashami & Jaggi 2023, arXiv:2305.16300, section 4.2)."""

PLACE = "{key}"
NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
