"""Classes of your own that follow a run (`trainer.callbacks`)."""

from jaxlm.observe.callbacks.base import Callback, CallbackConfig, CallbackContext
from jaxlm.observe.callbacks.calls import CallbackListener, Callbacks, open_callbacks

__all__ = ["Callback", "CallbackConfig", "CallbackContext", "CallbackListener", "Callbacks", "open_callbacks"]
