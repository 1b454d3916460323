"""What every other part stands on and what knows none of them."""

from jaxlm.core.imports import import_libraries

import_libraries()
